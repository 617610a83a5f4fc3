"""A critic with a gradient penalty (WGAN-GP, Gulrajani et al. 2017): the loss uses a gradient (create_graph=True)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import trainwright as tw


def clouds(count: int = 512) -> tuple[Tensor, Tensor]:
    """Two clouds of points, 3 apart: the distance that the critic learns to measure."""
    torch.manual_seed(0)
    return torch.randn(count, 2), torch.randn(count, 2) + torch.tensor([3.0, 0.0])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tw.Loss:
    here, there = batch
    between = torch.lerp(here, there, torch.rand(len(here), 1, device=here.device)).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).sum()
    distance = (model(there) - model(here)).sum()
    return tw.Loss(10 * penalty - distance, float(len(here)), {"distance": distance, "penalty": penalty})


def main(steps: int = 300, resume: Path | None = None) -> tw.Result:
    data = clouds()
    critic = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 1, bias=False))
    return tw.fit(critic, data, loss, batch=64, steps=steps, lr=5e-3, schedule="cosine", clip=1.0, resume=resume)


if __name__ == "__main__":
    main()
