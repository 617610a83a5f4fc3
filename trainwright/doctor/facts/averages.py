"""Measurements of copies of the weights, such as exponential moving averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Move:
    """One step in which a copy of the weights moved: ``copy += share * (weights - copy) + growth * copy``.

    Attributes:
        step: The step.
        share: The coefficient of the difference.
        growth: The coefficient of the copy.
        rest: Fraction of the move that both coefficients leave unexplained.
        rest_alone: Fraction of the move that ``share`` alone leaves unexplained.
    """

    step: int
    share: float
    growth: float
    rest: float
    rest_alone: float


@dataclass(frozen=True)
class CopyFacts:
    """A copy of a trained module: tensors of the same shapes that no optimizer holds.

    Attributes:
        kind: Class of the object that holds the copy.
        of: Path of the trained module.
        moves: The steps in which the copy moved.
        still: Names of tensors that never moved while their originals did.
        still_buffers: The same for buffers. An evaluation in train mode may have computed them.
        evaluations: Number of steps before which the copy was called without gradients.
        gap: Distance between copy and weights when the copy was found, relative to the norm of the weights.
    """

    kind: str
    of: str
    moves: tuple[Move, ...]
    still: tuple[str, ...]
    still_buffers: tuple[str, ...]
    evaluations: int
    gap: float


@dataclass(frozen=True)
class AveragesFacts:
    """Copies of the weights and their movement.

    Attributes:
        steps: Steps in which the copies were compared.
        is_resumed: The optimizer had a state when the watch began.
        copies: The copies.
    """

    experiment: ClassVar[str] = "averages"
    steps: int
    is_resumed: bool
    copies: tuple[CopyFacts, ...]


MAX_UNEXPLAINED = 0.05
"""Maximum fraction of a move that may stay unexplained, because a float32 copy is rounded."""
MIN_MOVES = 3
"""Minimum number of moves. Fewer may be a copy that is made from time to time."""


def averages_of(facts: AveragesFacts) -> list[CopyFacts]:
    """Returns the copies that follow the weights gradually instead of copying them."""
    return [each for each in facts.copies if len(each.moves) >= MIN_MOVES and not any(map(_is_copied, each.moves))]


def _is_copied(move: Move) -> bool:
    return abs(move.share - 1) < 1e-3 and move.rest_alone < MAX_UNEXPLAINED
