"""Which copies of the weights are averages of them."""

from __future__ import annotations

from trainwright.doctor.facts.averages import AveragesFacts, CopyFacts, Move

EXPLAINED = 0.05
"""Fraction of a move that the rounding of a float32 copy may leave unexplained."""
MOVES = 3
"""So many moves tell an average from a copy that is made now and then."""


def averages_of(facts: AveragesFacts | None) -> list[CopyFacts]:
    """Those that follow the weights, and not by copying them as a whole."""
    copies = facts.copies if facts is not None else ()
    return [each for each in copies if len(each.moves) >= MOVES and not any(map(_is_copied, each.moves))]


def _is_copied(move: Move) -> bool:
    return abs(move.share - 1) < 1e-3 and move.rest_alone < EXPLAINED
