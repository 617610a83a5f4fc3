"""GAN: points in the plane, a generator and a critic in turn, a moving average of the generator that is kept."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from zoo.hosts.report import Report, Watch
from zoo.hosts.worlds import points

LATENT = 6


class Generator(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.into = nn.Linear(LATENT, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, z: Tensor) -> Tensor:
        h = F.relu(self.norm(self.into(z)))
        h = F.relu(self.hidden(h))
        return self.out(h)


class Critic(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(1)


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    real_logits, fake_logits = critic(real), critic(fake)
    on_real = F.binary_cross_entropy_with_logits(real_logits, torch.ones_like(real_logits))
    on_fake = F.binary_cross_entropy_with_logits(fake_logits, torch.zeros_like(fake_logits))
    return on_real + on_fake


def gradient_penalty(critic: nn.Module, real: Tensor) -> Tensor:
    real = real.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
    return slope.square().sum(dim=1).mean()


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    for kept, new in zip(average.parameters(), model.parameters()):
        kept.mul_(decay).add_(new, alpha=1 - decay)


@torch.no_grad()
def distance(generator: nn.Module, real: Tensor) -> float:
    fake = generator(torch.randn(len(real), LATENT))
    across = torch.cdist(fake, real).mean()
    within = torch.cdist(fake, fake).mean() / 2 + torch.cdist(real, real).mean() / 2
    return (across - within).item()


def train(watch: Watch, seed: int, epochs: int = 14) -> Report:
    torch.manual_seed(seed)
    data = points(seed, 1536)
    batches = DataLoader(TensorDataset(data[:1024]), batch_size=128, shuffle=True, drop_last=True)
    held_out = data[1024:]

    generator, critic = Generator(), Critic()
    average = copy.deepcopy(generator).requires_grad_(False)
    optimizer_g = Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    optimizer_d = Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.99))
    losses, shown = [], distance(average, held_out)
    with watch([generator, critic], [optimizer_g, optimizer_d], loader=batches):
        for _ in range(epochs):
            for (real,) in batches:
                fake = generator(torch.randn(len(real), LATENT))
                loss_d = critic_loss(critic, real, fake.detach()) + 0.1 * gradient_penalty(critic, real)
                optimizer_d.zero_grad()
                loss_d.backward()
                optimizer_d.step()

                fake = generator(torch.randn(len(real), LATENT))
                fake_logits = critic(fake)
                loss_g = F.binary_cross_entropy_with_logits(fake_logits, torch.ones_like(fake_logits))
                optimizer_g.zero_grad()
                loss_g.backward()
                optimizer_g.step()
                update_average(average, generator, decay=0.95)
                losses.append(loss_d.item() + loss_g.item())
            shown = distance(average, held_out)
    return Report(average, {"distance": shown}, losses)
