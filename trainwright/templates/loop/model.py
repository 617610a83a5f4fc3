"""A small multilayer perceptron."""

from torch import nn


def make_model(width: int = 64) -> nn.Module:
    """Return a network that maps points (N, 2) to logits (N, 3)."""
    return nn.Sequential(
        nn.Linear(2, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 3),
    )
