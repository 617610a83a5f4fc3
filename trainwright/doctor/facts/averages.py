"""Measurements of copies of the weights, such as exponential moving averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Move:
    """One step in which a copy of the weights moved: ``copy += share * (weights - copy) + growth * copy``."""

    step: int
    share: float  # The coefficient of the difference
    growth: float  # The coefficient of the copy
    rest: float  # Fraction of the move that both coefficients leave unexplained
    rest_alone: float  # Fraction of the move that ``share`` alone leaves unexplained


@dataclass(frozen=True)
class StaleStatistics:
    """A normalization of a copy in eval mode. Its running mean has not changed since the copy was found."""

    module: str  # Path of the normalization
    step: int  # The step after which the copy was called
    distance: float  # Largest distance from the mean of the trained module, in standard deviations of the latter
    source: str | None  # Line of the call


@dataclass
class CopyFacts:
    """A copy of a trained module: tensors of the same shapes that no optimizer holds."""

    kind: str  # Class of the object that holds the copy
    of: str  # Path of the trained module
    moves: tuple[Move, ...] = ()  # The steps in which the copy moved
    gap: float = 0.0  # Distance between copy and weights when the copy was found, relative to the norm of the weights
    stale: StaleStatistics | None = None  # Statistics of a normalization that stay behind; None without any


@dataclass(frozen=True)
class AveragesFacts:
    """Copies of the weights and their movement."""

    experiment: ClassVar[str] = "averages"
    steps: int  # Steps in which the copies were compared
    is_resumed: bool  # The optimizer had a state when the watch began
    copies: tuple[CopyFacts, ...]


MAX_UNEXPLAINED = 0.05  # Maximum fraction of a move that may stay unexplained, because a float32 copy is rounded
MIN_MOVES = 3  # Minimum number of moves. Fewer may be a copy that is made from time to time.


def averages_of(facts: AveragesFacts) -> list[CopyFacts]:
    """Returns the copies that follow the weights gradually instead of copying them."""
    return [each for each in facts.copies if len(each.moves) >= MIN_MOVES and not any(map(_is_copied, each.moves))]


def _is_copied(move: Move) -> bool:
    return abs(move.share - 1) < 1e-3 and move.rest_alone < MAX_UNEXPLAINED
