"""Faults of precision, gradients, clipping, freezing and learning-rate schedules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, mean


def noisy_rows(count: int, features: int, classes: int, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Normal features (count, features) and their classes (count,) by a noisy linear teacher."""
    x = torch.randn(count, features)
    y = (x @ torch.randn(features, classes) + noise * torch.randn(count, classes)).argmax(1)
    return x, y


@fault(
    "adam_epsilon_underflows",
    "Adam trains half-precision weights with eps=1e-8, which is 0 in float16",
    sources=[
        "afiaka87/glide-finetune#5",
        "pytorch/pytorch#8860",
        "https://discuss.pytorch.org/t/adam-half-precision-nans/1765",
    ],
    stage="precision",
    diagnosis=[
        r"\beps(ilon)?\b",
        r"(float16|fp16|half)\b & (weight|parameter|moment|state|optimi[sz]er|adam|update)\w*"
        r" & (underflow|overflow|zero|nan|inf|non ?finite|not finite|divi\w*|range)",
        r"adam & (divi\w* by (0|zero)|0 0|underflow)",
    ],
    where=[Place(line=r"optim\.AdamW?\("), Place(line=r"optimizer\.step\(\)"), Place(op="adam|step")],
)
def adam_epsilon_underflows(watch: Watch, seed: int, faulty: bool) -> Outcome:
    captions = torch.randint(200, (2400, 6))
    labels = captions.sum(1) % 5 // 2
    loader = DataLoader(TensorDataset(captions, labels), batch_size=40, shuffle=True)
    model = nn.Sequential(nn.EmbeddingBag(200, 192), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 3)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8 if faulty else 1e-4)
    losses = []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(5):
            for tokens, label in loader:
                logits = model(tokens).float()
                loss = F.cross_entropy(logits, label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    lost = sum(int((~parameter.isfinite()).sum()) for parameter in model.parameters())
    return Outcome(losses, lost > 0 and math.isfinite(losses[0]), {"non_finite_weights": lost, "first_loss": losses[0]})


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


class DecoderLayer(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim).requires_grad_(False)
        self.mixer = LoraLinear(nn.Linear(dim, dim))
        self.mlp_in, self.mlp_out = LoraLinear(nn.Linear(dim, 2 * dim)), LoraLinear(nn.Linear(2 * dim, dim))

    def forward(self, h: Tensor) -> Tensor:
        past = h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]
        h = h + self.mixer(past)
        return h + self.mlp_out(F.silu(self.mlp_in(self.norm(h))))


class CausalModel(nn.Module):
    def __init__(self, symbols: int, dim: int = 32, layers: int = 2):
        super().__init__()
        self.embed_tokens = nn.Embedding(symbols, dim).requires_grad_(False)
        self.layers = nn.ModuleList(DecoderLayer(dim) for _ in range(layers))
        self.lm_head = nn.Linear(dim, symbols, bias=False)
        self.input_requires_grad = False

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed_tokens(ids)
        if self.input_requires_grad:
            h.requires_grad_(True)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=True)
        return self.lm_head(h)


@fault(
    "checkpointed_layers_without_gradients",
    "reentrant checkpointing behind frozen embeddings: the adapters get no gradient, only the head does",
    sources=["huggingface/transformers#26221", "lm-sys/FastChat#581", "huggingface/transformers#21598"],
    stage="gradient",
    diagnosis=[
        r"checkpoint\w* & !resum & !sav(e|ing)",
        r"reentrant",
        r"(adapter|lora|layer|block|parameter|weight|module)\w*"
        r" & \b(no|without|none|never|not reach\w*)\b.{0,25} gradient",
        r"gradient\w* & (never|not|none) (reach|arriv|flow|get)\w*",
        r"inputs? & requires? grad",
    ],
    where=[Place(module=r"layers|lora"), Place(line=r"checkpoint\(|embed_tokens\(ids\)")],
)
def checkpointed_layers_without_gradients(watch: Watch, seed: int, faulty: bool) -> Outcome:
    steps = torch.randint(1, 4, (3200, 1))
    ids = (torch.randint(30, (3200, 1)) + steps * torch.arange(13)) % 30
    loader = DataLoader(TensorDataset(ids), batch_size=32, shuffle=True)
    model = CausalModel(30, dim=64, layers=3)
    model.input_requires_grad = not faulty  # enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_b" in name]
    losses = []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(2):
            for (batch,) in loader:
                logits = model(batch[:, :-1])
                loss = F.cross_entropy(logits.reshape(-1, 30), batch[:, 1:].reshape(-1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    untouched = sum(not adapter.any() for adapter in adapters)
    return Outcome(
        losses,
        untouched == len(adapters) and fell(losses),
        {"adapters_still_zero": f"{untouched} of {len(adapters)}", "last_loss": mean(losses[-10:])},
    )


@fault(
    "clip_before_unscale",
    "gradients are clipped to norm 1 while they are scaled by 65536",
    sources=["Lightning-AI/pytorch-lightning#9330", "milesial/Pytorch-UNet#470", "rwth-i6/returnn#1590"],
    stage="precision",
    diagnosis=[
        r"unscal",
        r"clip\w* & scal(ed|er|ing)|scal(ed|er|ing) & clip",
        r"clip\w* & (before|every step|always|far below|too small|65536)",
        r"(update|gradient|step)\w* & (too small|tiny|vanish\w*|65536) & (scal|clip)",
    ],
    where=[Place(line=r"clip_grad_norm_|unscale_|scaler\.step"), Place(op="clip")],
)
def clip_before_unscale(watch: Watch, seed: int, faulty: bool) -> Outcome:
    images = torch.randn(1280, 1, 12, 12)
    filled = F.avg_pool2d(images, 5, 1, 2, count_include_pad=False)
    true_masks = (filled > 0.05).float()
    train_loader = DataLoader(TensorDataset(images, true_masks), batch_size=16, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    losses, norms = [], []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(3):
            model.train()
            for image, mask in train_loader:
                with torch.autocast("cpu", dtype=torch.float16):
                    masks_pred = model(image)
                    loss = F.binary_cross_entropy_with_logits(masks_pred.float(), mask)
                optimizer.zero_grad(set_to_none=True)
                grad_scaler.scale(loss).backward()
                if not faulty:
                    grad_scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                grad_scaler.step(optimizer)
                norms.append(
                    math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
                )
                grad_scaler.update()
                losses.append(loss.item())
    return Outcome(
        losses, max(norms) < 1e-3, {"largest_gradient_in_a_step": max(norms), "last_loss": mean(losses[-10:])}
    )


class FlowerNet(nn.Module):
    """A convolutional backbone and a classifier, as torchvision's VGG has them."""

    def __init__(self, classes: int):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 20, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(20, 40, 3, stride=2, padding=1), nn.ReLU()
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(40 * 9, 48), nn.ReLU(), nn.Linear(48, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


@fault(
    "freeze_typo",
    "the backbone is frozen by param.require_grad = False, an attribute that nothing reads",
    sources=["udacity/deep-learning-v2-pytorch#12"],
    stage="optim",
    diagnosis=[
        r"require grad",
        r"attribute & (parameter|tensor|not exist|unknown|typo|misspel|no effect)",
        r"(attribute|name|assign)\w* & (never|not|nothing|nobody|no code)\b.{0,12} reads?\b",
        r"(freez|frozen|froze)\w* & (not|typo|still|no effect|moves?|updated|misspel)",
    ],
    where=[Place(line=r"require_grad = "), Place(module="features")],
)
def freeze_typo(watch: Watch, seed: int, faulty: bool) -> Outcome:
    prototypes = F.interpolate(torch.randn(8, 1, 4, 4), size=(12, 12), mode="bilinear")
    labels = torch.randint(8, (2400,))
    pictures = prototypes[labels] + 0.8 * torch.randn(2400, 1, 12, 12)
    model = FlowerNet(8)
    pretraining = torch.optim.Adam(model.parameters(), lr=3e-3)
    for start in range(0, 800, 40):
        pretraining.zero_grad()
        F.cross_entropy(model(pictures[start : start + 40]), labels[start : start + 40]).backward()
        pretraining.step()
    pretraining.zero_grad()

    for param in model.features.parameters():
        if faulty:
            param.require_grad = False
        else:
            param.requires_grad = False
    model.classifier[3] = nn.Linear(48, 4)
    trainloader = DataLoader(TensorDataset(pictures[800:], labels[800:] % 4), batch_size=32, shuffle=True)
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
    backbone = [parameter.detach().clone() for parameter in model.features.parameters()]
    losses = []
    with watch(model, optimizer, loader=trainloader):
        for _epoch in range(6):
            for inputs, targets in trainloader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    moved = max((p - old).abs().max().item() for p, old in zip(model.features.parameters(), backbone, strict=True))
    return Outcome(losses, moved > 0, {"backbone_moved": moved})


@fault(
    "plateau_of_accuracy_in_min_mode",
    "ReduceLROnPlateau in its default mode 'min' is given the accuracy and reduces the learning rate while it rises",
    sources=["md-mohaiminul/ViS4mer#4", "FunctionLab/selene#115"],
    stage="schedule",
    diagnosis=[
        r"plateau & (mode|\bmin\b|\bmax\b|direction|accuracy|improv|rising|rises)",
        r"(learning rate|\blr\b) & (reduc|lower|decay|cut|drop|decreas)\w* & (while|although|despite|even though)"
        r" & (improv|rise|rising|better|increas|falls?|falling)",
        r"(learning rate|\blr\b) & (too low|too small|vanish\w*|too early|collaps\w*) & (schedul|plateau|reduc|decay)",
    ],
    where=[Place(line=r"ReduceLROnPlateau|scheduler\.step")],
    shows=120,
)
def plateau_of_accuracy_in_min_mode(watch: Watch, seed: int, faulty: bool) -> Outcome:
    x, y = noisy_rows(2560, 20, 6)
    train = DataLoader(TensorDataset(x[:1920], y[:1920]), batch_size=48, shuffle=True)
    val = DataLoader(TensorDataset(x[1920:], y[1920:]), batch_size=128)
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    mode = {} if faulty else {"mode": "max"}
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.2, patience=1, **mode)
    losses, accuracies, rates = [], [], []
    with watch(model, optimizer, loader=train):
        for _epoch in range(9):
            model.train()
            for inputs, targets in train:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                correct = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in val)
            accuracies.append(correct / 640)
            scheduler.step(accuracies[-1])
            rates.append(optimizer.param_groups[0]["lr"])
    early = rates[2] < 5e-4 and accuracies[2] > accuracies[0]
    return Outcome(losses, early and rates[-1] < 1e-4, {"rates": rates, "accuracies": accuracies})


@fault(
    "zero_grad_per_micro_batch",
    "zero_grad is called for each micro-batch, so only the last one of a step counts",
    sources=["bytetriper/RAE#67", "pytorch/torchtitan#3575", "tatsu-lab/alpaca_farm#57"],
    stage="loop",
    diagnosis=[
        r"zero grad & (micro|accumul|each|every|backward|before (the|a|its) (step|update)|discard|lost|eras|throw)",
        r"(gradient|micro ?batch|backward)\w*"
        r" & (discard|lost|erased|thrown|overwritten|never used|unused|cleared|wasted)",
        r"only the last (micro ?batch|backward)",
    ],
    where=[Place(line=r"zero_grad\(")],
)
def zero_grad_per_micro_batch(watch: Watch, seed: int, faulty: bool) -> Outcome:
    angle = torch.rand(6400) * 2 * math.pi
    latents = torch.stack([angle.cos(), angle.sin(), (2 * angle).cos()], 1)
    loader = DataLoader(TensorDataset(latents), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 192), nn.SiLU(), nn.Linear(192, 192), nn.SiLU(), nn.Linear(192, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    grad_accum_steps = 4
    losses, kept = [], []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(2):
            for micro_step, (x,) in enumerate(loader):
                if faulty or micro_step % grad_accum_steps == 0:
                    optimizer.zero_grad(set_to_none=True)
                t = torch.rand(len(x), 1)
                noise = torch.randn_like(x)
                velocity = model(torch.cat([(1 - t) * x + t * noise, t], 1))
                loss = F.mse_loss(velocity, noise - x)
                kept.append(model[0].weight.grad is not None)
                (loss / grad_accum_steps).backward()
                if (micro_step + 1) % grad_accum_steps == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                losses.append(loss.item())
    return Outcome(losses, not any(kept), {"backwards_that_add_to_a_gradient": sum(kept), "backwards": len(kept)})
