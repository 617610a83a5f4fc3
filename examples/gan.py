"""A GAN (Goodfellow et al. 2014): two optimizers that take turns, in a custom step."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

NOISE = 4


class Gan(nn.Module):
    """The two players."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def ring(count: int = 512) -> Tensor:
    """Points on a circle, with a little noise."""
    torch.manual_seed(0)
    angle = torch.rand(count) * 6.2832
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def main(steps: int = 1000, resume: Path | None = None) -> tw.Result:
    points = ring()
    model = Gan()
    for_generator = torch.optim.Adam(model.generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    for_critic = torch.optim.Adam(model.critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def step(state: tw.TrainState, batch: tw.StepBatch) -> tw.Loss:
        (real,) = batch.data
        fake = model.generator(torch.randn(len(real), NOISE, device=real.device))

        critic_loss = F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(fake.detach())).mean()
        for_critic.zero_grad()
        critic_loss.backward()
        for_critic.step()

        generator_loss = F.softplus(-model.critic(fake)).mean()
        for_generator.zero_grad()
        generator_loss.backward()
        for_generator.step()
        return tw.Loss(critic_loss, 1.0, {"generator": generator_loss})

    return tw.fit(
        model, (points,), advance=step, optimizer=[for_generator, for_critic], batch=64, steps=steps, resume=resume
    )


if __name__ == "__main__":
    main()
