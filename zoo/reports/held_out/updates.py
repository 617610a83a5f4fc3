"""Faults between the loss and the new weights: clipping, averages, parameter groups, schedules."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, mean


@fault(
    "average_in_half_precision",
    "the moving average of the weights is kept in bfloat16, where its small updates are rounded away",
    sources=["d8ahazard/sd_dreambooth_extension#1415", "AndreasBergmeister/ram#6"],
    stage="precision",
    diagnosis=[
        r"(average|\bema\b|moving|shadow|averaged)\w*"
        r" & (never|not mov|stay|bf16|bfloat16|float16|half|precision|round|stuck)",
        r"(average|\bema\b|shadow)\w* & (unchanged|same as|equal to|initial|start|still)",
    ],
    where=[Place(line=r"lerp_|ema|\.mul_\(decay\)")],
    shows=20,
)
def average_in_half_precision(watch: Watch, seed: int, faulty: bool) -> Outcome:
    latents = torch.randn(6400, 2) * torch.tensor([0.3, 1.0])
    latents[:, 0] += latents[:, 1].square() - 1
    loader = DataLoader(TensorDataset(latents), batch_size=32, shuffle=True)
    unet = nn.Sequential(nn.Linear(3, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2))
    ema_unet = copy.deepcopy(unet).requires_grad_(False).eval()
    if faulty:
        ema_unet = ema_unet.to(torch.bfloat16)
    start = [parameter.clone() for parameter in ema_unet.parameters()]
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    decay = 0.999
    alphas = torch.linspace(0.999, 0.01, 50)
    losses = []
    with watch(unet, optimizer, loader=loader):
        for _epoch in range(2):
            for (x,) in loader:
                timesteps = torch.randint(50, (len(x), 1))
                noise = torch.randn_like(x)
                noisy = alphas[timesteps].sqrt() * x + (1 - alphas[timesteps]).sqrt() * noise
                loss = F.mse_loss(unet(torch.cat([noisy, timesteps / 50], 1)), noise)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for ema_param, param in zip(ema_unet.parameters(), unet.parameters(), strict=True):
                        ema_param.mul_(decay).add_(param.to(ema_param.dtype), alpha=1 - decay)
                losses.append(loss.item())
    same = sum(int((p == old).sum()) for p, old in zip(ema_unet.parameters(), start, strict=True))
    fraction = same / sum(parameter.numel() for parameter in start)
    return Outcome(losses, fraction > 0.3, {"fraction_of_the_average_unchanged": fraction}, learned=fell(losses, 0.99))


class LoraAttention(nn.Module):
    """Frozen attention with low-rank updates of queries and values."""

    def __init__(self, dim: int, rank: int = 4):
        super().__init__()
        self.to_qkv = nn.Linear(dim, 3 * dim).requires_grad_(False)
        self.to_out = nn.Linear(dim, dim).requires_grad_(False)
        self.lora_down = nn.Parameter(torch.randn(rank, dim) / dim**0.5)
        self.lora_up = nn.Parameter(torch.zeros(3 * dim, rank))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.to_qkv(x) + x @ self.lora_down.T @ self.lora_up.T).chunk(3, -1)
        return x + self.to_out(F.scaled_dot_product_attention(q, k, v))


@fault(
    "clip_of_exhausted_generator",
    "clip_grad_norm_ gets the filter object that the optimizer has already read, so nothing is clipped",
    sources=["PixArt-alpha/PixArt-alpha#160", "pytorch/pytorch#148259"],
    stage="gradient",
    diagnosis=[
        r"clip"
        r" & (no effect|empty|exhaust|generator|iterator|nothing|no parameter|no gradient|not applied|never|without)",
        r"(generator|iterator|filter)\b & (empty|exhaust|consumed|read once|already|twice)",
    ],
    where=[Place(line=r"clip_grad_norm_|filter\(lambda"), Place(op="clip")],
)
def clip_of_exhausted_generator(watch: Watch, seed: int, faulty: bool) -> Outcome:
    transformer = nn.Sequential(nn.Linear(8, 32).requires_grad_(False), LoraAttention(32), LoraAttention(32))
    transformer.append(nn.Linear(32, 8))
    loader = DataLoader(TensorDataset(torch.randn(3200, 6, 8)), batch_size=16, shuffle=True)
    mixing = torch.randn(8, 8) / 8**0.5
    lora_layers = filter(lambda p: p.requires_grad, transformer.parameters())
    params = lora_layers if faulty else list(lora_layers)
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-2)
    max_grad_norm = 1.0
    losses, norms = [], []
    with watch(transformer, optimizer, loader=loader):
        for _epoch in range(2):
            for (latents,) in loader:
                target = latents @ mixing + latents.mean(1, keepdim=True)
                scale = torch.rand(len(latents), 1, 1) * 4
                loss = (scale * (transformer(latents) - target).square()).mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(params, max_grad_norm)
                gradients = [p.grad.norm() for p in transformer.parameters() if p.grad is not None]
                norms.append(torch.stack(gradients).norm().item())
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    above = sum(norm > 1.01 * max_grad_norm for norm in norms)
    return Outcome(losses, above > 20, {"steps_above_the_clip": above, "largest_norm": max(norms)})


class DynamicEmbedding(nn.Module):
    """Embeds the nodes of a graph that changes, one snapshot after the other."""

    def __init__(self, features: int, hidden: int = 48):
        super().__init__()
        self.gcn = nn.Linear(features, hidden)
        self.rnn = nn.GRUCell(hidden, hidden)
        self.decoder = nn.Linear(hidden, hidden)

    def forward(self, snapshots: Tensor, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), self.rnn.hidden_size)
        for adjacency in snapshots:
            h = self.rnn(F.relu(self.gcn(adjacency @ x)), h)
        return 4 * self.decoder(h) @ h.T


@fault(
    "clip_after_step",
    "gradients are clipped after the optimizer's step, which has used them unclipped",
    sources=["VGraphRNN/VGRNN#4"],
    stage="loop",
    diagnosis=[
        r"clip & (after|no effect|too late|late|order|never|not applied|unclipped|before (it|the optimi[sz]er))",
        r"step & before & clip",
    ],
    where=[Place(line=r"clip_grad_norm_"), Place(op="clip")],
)
def clip_after_step(watch: Watch, seed: int, faulty: bool) -> Outcome:
    group = torch.arange(48) % 4
    likely = torch.where(group[:, None] == group[None, :], 0.5, 0.06)
    x = F.one_hot(group, 4) + 0.8 * torch.randn(48, 4)
    model = DynamicEmbedding(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, norms = [], []
    with watch(model, optimizer):
        for _step in range(400):
            graphs = torch.bernoulli(likely.expand(6, 48, 48)).triu(1)
            graphs = graphs + graphs.transpose(1, 2) + torch.eye(48)
            loss = F.binary_cross_entropy_with_logits(model(graphs[:5] / graphs[:5].sum(2, keepdim=True), x), graphs[5])
            optimizer.zero_grad()
            loss.backward()
            if not faulty:
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item())
            optimizer.step()
            if faulty:
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            losses.append(loss.item())
    above = sum(norm > 0.202 for norm in norms)
    return Outcome(losses, above > 20, {"steps_above_the_clip": above, "largest_norm": max(norms)})


class MultimodalTagger(nn.Module):
    """Tags words with the help of a picture."""

    def __init__(self, words: int, tags: int):
        super().__init__()
        self.bert = nn.Sequential(nn.Embedding(words, 32), nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))
        self.encoder_conv = nn.Sequential(nn.Linear(16, 32), nn.Tanh())
        self.gates = nn.Linear(32, 32)
        self.fc = nn.Linear(32, tags)

    def forward(self, ids: Tensor, picture: Tensor) -> Tensor:
        prompt = self.gates(self.encoder_conv(picture))
        return self.fc(self.bert(ids) + prompt[:, None])


@fault(
    "head_not_in_optimizer",
    "the parameter group of the head is made and never appended, so the optimizer does not hold the head",
    sources=["zjunlp/HVPNeT#5", "ifzhang/FairMOT#125", "facebookresearch/mmf#620"],
    stage="optim",
    diagnosis=[
        r"(not|no|missing|outside|without|absent)\b & optimi[sz]er"
        r" & (parameter|weight|head|group|held|registered|passed)",
        r"(parameter|weight|head|layer)\w* & (never|not|no) (updat|mov|chang|train|optimi[sz])\w*",
    ],
    where=[Place(module="fc"), Place(line=r"parameters\.append|AdamW\(")],
)
def head_not_in_optimizer(watch: Watch, seed: int, faulty: bool) -> Outcome:
    ids = torch.randint(50, (1920, 8))
    pictures = torch.randn(1920, 16)
    tags = (ids % 3) + 3 * (pictures[:, :1] > 0).long()
    loader = DataLoader(TensorDataset(ids, pictures, tags), batch_size=32, shuffle=True)
    model = MultimodalTagger(50, 6)
    parameters = []
    params = {"lr": 2e-3, "weight_decay": 1e-2, "params": list(model.bert.parameters())}
    parameters.append(params)
    params = {"lr": 2e-3, "weight_decay": 1e-2, "params": []}
    for name, param in model.named_parameters():
        if "encoder_conv" in name or name.startswith("gates"):
            params["params"].append(param)
    parameters.append(params)
    params = {"lr": 5e-3, "weight_decay": 1e-2, "params": []}
    for name, param in model.named_parameters():
        if "crf" in name or name.startswith("fc"):
            params["params"].append(param)
    if not faulty:
        parameters.append(params)
    optimizer = torch.optim.AdamW(parameters)
    start = model.fc.weight.detach().clone()
    losses = []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(8):
            for words, picture, labels in loader:
                model.zero_grad()
                loss = F.cross_entropy(model(words, picture).flatten(0, 1), labels.flatten())
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    moved = (model.fc.weight - start).abs().max().item()
    return Outcome(losses, moved == 0 and fell(losses), {"head_moved": moved, "last_loss": mean(losses[-20:])})


@fault(
    "schedule_stepped_per_batch",
    "a schedule that is defined in epochs is stepped in the batch loop, and the learning rate is gone in one epoch",
    sources=["ivadomed/ivadomed#55", "automl/Auto-PyTorch#210"],
    stage="schedule",
    diagnosis=[
        r"schedul\w*"
        r" & (batch|epoch|per step|every step|each step|too (fast|often|early|soon)|step ?size|over|finished)",
        r"(learning rate|\blr\b)"
        r" & (vanish|decay|collaps|too low|too small|negligible|zero|\b0\b|no progress|fall|gone)",
    ],
    where=[Place(line=r"scheduler\.step|StepLR")],
)
def schedule_stepped_per_batch(watch: Watch, seed: int, faulty: bool) -> Outcome:
    slices = torch.randn(1600, 1, 12, 12)
    masks = (F.avg_pool2d(slices, 5, 1, 2, count_include_pad=False) > 0.05).float()
    train_loader = DataLoader(TensorDataset(slices, masks), batch_size=20, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    losses, rates = [], []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(4):
            model.train()
            for batch, target in train_loader:
                preds = model(batch)
                loss = F.binary_cross_entropy_with_logits(preds, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if faulty:
                    scheduler.step()
                losses.append(loss.item())
                rates.append(optimizer.param_groups[0]["lr"])
            if not faulty:
                scheduler.step()
    gone = next((step for step, rate in enumerate(rates) if rate < 5e-5), None)
    return Outcome(
        losses, rates[79] < 1e-6, {"rate_after_an_epoch": rates[79], "last_loss": mean(losses[-20:])}, shows=gone
    )


@fault(
    "warmup_counts_micro_batches",
    "the schedule counts micro-batches but advances once in eight of them, so training ends within the warm-up",
    sources=["huggingface/diffusers#4387", "bmaltais/kohya_ss#735", "axolotl-ai-cloud/axolotl#977"],
    stage="schedule",
    diagnosis=[
        r"(warm ?up|schedul\w*)"
        r" & (never|not|accumul|micro|does not (end|finish|complete)|too long|all|whole|still|incomplete)",
        r"(learning rate|\blr\b) & (never|not) & (reach|peak|decay|planned|maximum)",
        r"(accumul|micro ?batch)\w* & (schedul|warm ?up|learning rate|\blr\b)",
    ],
    where=[Place(line=r"num_training_steps|num_warmup_steps|LambdaLR|lr_scheduler\.step")],
    shows=200,
)
def warmup_counts_micro_batches(watch: Watch, seed: int, faulty: bool) -> Outcome:
    x = torch.randn(6400, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    train_dataloader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    gradient_accumulation_steps, epochs = 8, 4
    num_training_steps = epochs * len(train_dataloader)
    if not faulty:
        num_training_steps = math.ceil(num_training_steps / gradient_accumulation_steps)
    num_warmup_steps = num_training_steps // 5

    def linear_with_warmup(step: int) -> float:
        if step < num_warmup_steps:
            return step / num_warmup_steps
        return max(0.0, (num_training_steps - step) / (num_training_steps - num_warmup_steps))

    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, linear_with_warmup)
    losses, rates = [], []
    with watch(model, optimizer, loader=train_dataloader):
        for _epoch in range(epochs):
            for step, (batch, labels) in enumerate(train_dataloader, 1):
                loss = F.cross_entropy(model(batch), labels)
                (loss / gradient_accumulation_steps).backward()
                if step % gradient_accumulation_steps == 0:
                    optimizer.step()
                    rates.append(optimizer.param_groups[0]["lr"])
                    lr_scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
    rising = rates == sorted(rates)
    return Outcome(losses, rising and max(rates) < 3e-3, {"largest_rate": max(rates), "last_rate": rates[-1]})
