"""What is measured of tensors that follow the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Move:
    """One step in which a copy of the weights moved: ``copy += share * (weights - copy) + growth * copy``.

    ``rest`` is the part of the move that this does not explain, ``rest_alone`` what the share alone does not.
    ``shares`` are those of each sampled tensor by itself, ``rests`` what they do not explain of it.
    """

    step: int
    share: float
    growth: float
    rest: float
    rest_alone: float
    shares: tuple[float, ...]
    rests: tuple[float, ...]


@dataclass(frozen=True)
class CopyFacts:
    """Tensors of the shapes of a trained module, that no optimizer holds. ``kind`` is what holds them.

    ``still`` are names of tensors that never moved while their originals did; ``still_buffers`` of buffers.
    ``evaluations`` are the steps before which it was called without gradients, ``has_moved`` whether any of it did.
    """

    kind: str
    of: str
    names: tuple[str, ...]
    moves: tuple[Move, ...]
    still: tuple[str, ...]
    still_buffers: tuple[str, ...]
    evaluations: int
    has_moved: bool


@dataclass(frozen=True)
class CopiesFacts:
    """The copies of the weights that were found, and what they did in ``steps`` steps.

    ``since`` are the steps since they were found, ``own_evaluations`` those before which the model itself was called
    without gradients.
    """

    experiment: ClassVar[str] = "copies_of_weights"
    steps: int
    since: int
    own_evaluations: int
    copies: tuple[CopyFacts, ...]
