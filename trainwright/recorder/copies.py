"""Copies of a model: what a loop evaluates, or keeps as an average, beside what it trains."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def is_a_copy(module: nn.Module, roots: Sequence[nn.Module]) -> bool:
    """Whether it has the shapes of a root, and none of the parameters of any."""
    ours = {id(p) for root in roots for p in root.parameters()}
    theirs = list(module.parameters())
    shapes = [[p.shape for p in root.parameters()] for root in roots]
    return bool(theirs) and not any(id(p) in ours for p in theirs) and [p.shape for p in theirs] in shapes
