"""A small policy."""

from torch import nn


def make_policy(width: int = 64) -> nn.Module:
    """Return a network that maps observations (N, 4) to logits of actions (N, 2)."""
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
