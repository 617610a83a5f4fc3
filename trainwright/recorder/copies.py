"""Copies of a model that a loop evaluates, or keeps as an average, besides the trained model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy


def is_a_copy(module: nn.Module, roots: Sequence[nn.Module]) -> bool:
    """Returns True if a module has the shapes of a root and shares no parameters with any root."""
    ours = {id(p) for root in roots for p in root.parameters()}
    theirs = list(module.parameters())
    if any(map(is_lazy, (*theirs, *(p for root in roots for p in root.parameters())))):  # no shape yet
        return False
    shapes = [[p.shape for p in root.parameters()] for root in roots]
    return bool(theirs) and not any(id(p) in ours for p in theirs) and [p.shape for p in theirs] in shapes
