"""Contrastive learning: an encoder for each of two senses, InfoNCE with a learned temperature, a resume half-way."""

from __future__ import annotations

import io

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from zoo.hosts.report import Report, Watch
from zoo.hosts.worlds import pairs


class Encoder(nn.Module):
    def __init__(self, features: int, width: int = 96, out: int = 16) -> None:
        super().__init__()
        self.into = nn.Linear(features, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.relu(self.norm(self.into(x))))
        return F.normalize(self.out(h), dim=-1)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Encoder(24), Encoder(20)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.log_scale.exp() * self.first(a) @ self.second(b).T


def info_nce(similarity: Tensor) -> Tensor:
    labels = torch.arange(len(similarity))
    return (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.T, labels)) / 2


def augment(x: Tensor) -> Tensor:
    kept = (torch.rand(x.shape) > 0.1).float()
    return (x + 0.1 * torch.randn_like(x)) * kept


@torch.no_grad()
def evaluate(model: nn.Module, batches: DataLoader) -> tuple[float, float]:
    model.eval()
    losses, hits, count = [], 0, 0
    for a, b in batches:
        similarity = model(a, b)
        losses.append(info_nce(similarity).item())
        hits += (similarity.argmax(dim=1) == torch.arange(len(a))).sum().item()
        count += len(a)
    model.train()
    return sum(losses) / len(losses), hits / count


def fit(watch: Watch, seed: int, epochs: int, checkpoint: bytes | None) -> tuple[bytes, Report]:
    torch.manual_seed(seed)
    a, b = pairs(seed, 1280)
    batches = DataLoader(TensorDataset(a[:1024], b[:1024]), batch_size=64, shuffle=True, drop_last=True)
    held_out = DataLoader(TensorDataset(a[1024:], b[1024:]), batch_size=64)

    model = Pair()
    optimizer = AdamW(model.parameters(), lr=5e-3, weight_decay=0.02)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.6)
    first_epoch, losses = 0, []
    if checkpoint is not None:
        state = torch.load(io.BytesIO(checkpoint), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"] + 1
        losses = state["losses"]
        torch.set_rng_state(state["rng"])

    shown = (0.0, 0.0)
    with watch(model, optimizer, loader=batches, scheduler=scheduler):
        for epoch in range(first_epoch, epochs):
            model.train()
            for a_batch, b_batch in batches:
                loss = info_nce(model(augment(a_batch), augment(b_batch)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    model.log_scale.clamp_(0.0, 4.0)
                losses.append(loss.item())
            scheduler.step()
            shown = evaluate(model, held_out)
            file = io.BytesIO()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            state.update(scheduler=scheduler.state_dict(), losses=losses, rng=torch.get_rng_state())
            torch.save(state, file)
    return file.getvalue(), Report(model, {"loss": shown[0], "accuracy": shown[1]}, losses)


def train(watch: Watch, seed: int) -> Report:
    saved, _ = fit(watch, seed, 3, None)
    _, report = fit(watch, seed, 6, saved)
    return report
