"""Measurements of copies of the weights that follow them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Move:
    """One step in which a copy of the weights moved: ``copy += share * (weights - copy) + growth * copy``.

    ``rest`` is the part of the move that this does not explain, ``rest_alone`` what the share alone does not.
    """

    step: int
    share: float
    growth: float
    rest: float
    rest_alone: float


@dataclass(frozen=True)
class CopyFacts:
    """Tensors of the shapes of a trained module ``of``, that no optimizer holds. ``kind`` is the class that holds them.

    Attributes:
        still: Tensors that never moved while their originals did; ``still_buffers`` the same of buffers, which an
            evaluation in train mode may compute.
        evaluations: Steps before which it was called without gradients.
        gap: Distance of copy and weights when it was found, relative to the size of the weights.
        has_moved: Whether any of it moved.
    """

    kind: str
    of: str
    moves: tuple[Move, ...]
    still: tuple[str, ...]
    still_buffers: tuple[str, ...]
    evaluations: int
    gap: float
    has_moved: bool


@dataclass(frozen=True)
class AveragesFacts:
    """The copies of the weights that were found, and what they did in ``steps`` steps.

    ``since`` are the steps since they were found, ``own_evaluations`` those before which the model itself was called
    without gradients. ``is_resumed``: the optimizer had a state when the watch began.
    """

    experiment: ClassVar[str] = "averages"
    steps: int
    since: int
    own_evaluations: int
    is_resumed: bool
    copies: tuple[CopyFacts, ...]
