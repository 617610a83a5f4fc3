"""Diffusion: the noise in a noised point is predicted; a moving average of the weights is what is kept."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from zoo.hosts.report import Report, Watch
from zoo.hosts.worlds import moons

STEPS = 40


def noise_schedule(steps: int) -> Tensor:
    """What is left of the signal's variance after each step."""
    betas = torch.linspace(1e-3, 0.15, steps)
    return torch.cumprod(1.0 - betas, dim=0)


def time_features(t: Tensor, size: int) -> Tensor:
    frequencies = torch.exp(-math.log(1000.0) * torch.arange(size // 2) / (size // 2))
    angles = t[:, None].float() * frequencies[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Denoiser(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.into = nn.Linear(2, width)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.into(x)
        time = self.time(time_features(t, 16))
        for norm, layer in zip(self.norms, self.hidden):
            h = h + F.silu(layer(norm(h) + time))
        return self.out(h)


def add_noise(x: Tensor, noise: Tensor, t: Tensor, kept: Tensor) -> Tensor:
    share = kept[t].unsqueeze(1)
    return share.sqrt() * x + (1 - share).sqrt() * noise


def noise_loss(model: nn.Module, x: Tensor, kept: Tensor) -> Tensor:
    t = torch.randint(0, STEPS, (len(x),))
    noise = torch.randn_like(x)
    predicted = model(add_noise(x, noise, t, kept), t)
    return F.mse_loss(predicted, noise)


class Average:
    """A moving average of the weights that warms up."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval()
        self.model.requires_grad_(False)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for kept, new in zip(self.model.parameters(), model.parameters()):
            kept.lerp_(new, 1 - decay)


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, kept: Tensor) -> float:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return sum(noise_loss(model, x, kept).item() for _ in range(4)) / 4


def train(watch: Watch, seed: int, epochs: int = 12) -> Report:
    torch.manual_seed(seed)
    data = moons(seed, 1536)
    batches = DataLoader(TensorDataset(data[:1280]), batch_size=128, shuffle=True, drop_last=True)
    held_out = data[1280:]
    kept = noise_schedule(STEPS)

    model = Denoiser()
    average = Average(model, decay=0.98)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    losses, shown = [], 0.0
    with watch(model, optimizer, loader=batches):
        for epoch in range(epochs):
            if epoch == 8:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.3
            for (x,) in batches:
                loss = noise_loss(model, x, kept)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                average.update(model)
                losses.append(loss.item())
            shown = evaluate(average.model, held_out, kept)
    return Report(average.model, {"loss": shown}, losses, {"kept": kept})
