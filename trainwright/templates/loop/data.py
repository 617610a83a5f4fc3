"""Points on three spirals. Put your own data here."""

import math

import torch
from torch.utils.data import TensorDataset


def spirals(split: str, count: int = 1200) -> TensorDataset:
    """Return (point (2,), number of its spiral)."""
    generator = torch.Generator().manual_seed(1 if split == "val" else 0)
    labels = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator).sqrt()
    noise = 0.15 * torch.randn(count, generator=generator)
    angle = 2 * math.pi * (labels / 3 + 0.75 * radius) + noise
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points, labels)
