"""Legal ways to learn to draw points: moments, a critic of small weights, a denoiser that sees its guess or teaches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, RMSprop

from zoo.hosts.worlds import MODES
from zoo.programs.densities import _in_the_plane
from zoo.programs.training import Batch, Training


def _drawing() -> nn.Sequential:
    """Makes points (n, 2) of noise (n, 4)."""
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def moment_matching(t: Training) -> None:
    """Generative moment matching (Li et al., 2015): without a critic, kernels say how far from true points one is."""
    _in_the_plane(t)
    t.model, t.batch_size, t.epochs = _drawing(), 128, 30

    def likeness(one: Tensor, other: Tensor) -> Tensor:
        apart = (one.unsqueeze(1) - other).square().sum(2)
        return torch.stack([(-apart / (2 * width**2)).exp().mean() for width in (0.1, 0.3, 1.0)]).sum()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        made = model(2 * torch.rand(len(batch[0]), 4) - 1)
        return (likeness(batch[0], batch[0]) + likeness(made, made) - 2 * likeness(batch[0], made)).sqrt()

    t.loss = loss


def clipped_critic(t: Training) -> None:
    """The Wasserstein GAN (Arjovsky et al., 2017): a critic of small weights steps five times for each of the other."""
    _in_the_plane(t)
    t.model, t.batch_size, t.epochs = _drawing(), 64, 80
    critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    t.extra.append(critic)
    t.optimizers_of = lambda training: [RMSprop(each.parameters(), lr=1e-3) for each in training.modules]

    def update(training: Training, batch: Batch) -> Tensor:
        drawing, judging = training.optimizers
        with torch.no_grad():
            made = training.model(torch.randn(len(batch[0]), 4))
        judging.zero_grad()
        gap = critic(batch[0]).mean() - critic(made).mean()
        (-gap).backward()
        judging.step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.1, 0.1)
        if training.steps % 5 == 4:
            drawing.zero_grad()
            (-critic(training.model(torch.randn(len(batch[0]), 4))).mean()).backward()
            drawing.step()
        return gap.detach()

    t.update = update


class Guessing(nn.Module):
    """What a noisy point was, from the point, an earlier guess, and how noisy it is (n, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def forward(self, noisy: Tensor, guess: Tensor, time: Tensor) -> Tensor:
        return self.body(torch.cat([noisy, guess, time, (3 * time).sin()], 1))


def self_conditioned(t: Training) -> None:
    """Self-conditioning (Chen et al., 2023): half of the time a denoiser sees what it has just guessed."""
    _in_the_plane(t)
    t.model, t.epochs, t.batch_size = Guessing(), 60, 64

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, time = batch[0], torch.rand(len(batch[0]), 1)
        kept = (torch.pi / 2 * time).cos().square()
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * torch.randn_like(x)
        guess = torch.zeros_like(x)
        if float(torch.rand(())) < 0.5:
            with torch.no_grad():
                guess = model(noisy, guess, time)
        return F.mse_loss(model(noisy, guess, time), x)

    t.loss = loss


def _noised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What has become of x (n, 2) at random times, the times (n, 1), and the noise (n, 2)."""
    time, noise = 0.02 + 0.96 * torch.rand(len(x), 1), torch.randn_like(x)
    return (time * torch.pi / 2).cos() * x + (time * torch.pi / 2).sin() * noise, time, noise


def distilled_scores(t: Training) -> None:
    """Score distillation (Poole et al., 2023): what a frozen diffusion model would correct is the gradient."""
    denoiser = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    first = Adam(denoiser.parameters(), lr=5e-3)
    for _ in range(600):
        kind = torch.randint(3, (128,))
        noisy, time, noise = _noised(MODES[kind] + 0.12 * torch.randn(128, 2))
        wish = F.one_hot(kind, 3) * (torch.rand(128, 1) > 0.15)
        first.zero_grad()
        F.mse_loss(denoiser(torch.cat([noisy, time, wish], 1)), noise).backward()
        first.step()
    denoiser.requires_grad_(False)
    t.model, t.lr = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 2)), 3e-3

    def draw(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for _ in range(75 * training.epochs):
            wish = F.one_hot(torch.randint(3, (64,)), 3).float()
            x = training.model(torch.cat([wish, torch.randn(64, 2)], 1))
            with torch.no_grad():
                noisy, time, noise = _noised(x)
                free, led = (denoiser(torch.cat([noisy, time, each], 1)) for each in (0 * wish, wish))
                wrong = free + 1.5 * (led - free) - noise
                force = (time * torch.pi / 2).sin().square() * wrong
            optimizer.zero_grad()
            x.backward(force / len(x))  # not through the denoiser
            optimizer.step()
            yield force.square().sum(1).mean()

    t.loop, t.loaded = draw, False
