"""Selects the copies of the weights that are averages of them."""

from __future__ import annotations

from trainwright.doctor.facts.averages import AveragesFacts, CopyFacts, Move

MAX_UNEXPLAINED = 0.05
"""Maximum fraction of a move that may stay unexplained, because a float32 copy is rounded."""
MIN_MOVES = 3
"""Minimum number of moves. Fewer may be a copy that is made from time to time."""


def averages_of(facts: AveragesFacts | None) -> list[CopyFacts]:
    """Returns the copies that follow the weights gradually instead of copying them."""
    copies = facts.copies if facts is not None else ()
    return [each for each in copies if len(each.moves) >= MIN_MOVES and not any(map(_is_copied, each.moves))]


def _is_copied(move: Move) -> bool:
    return abs(move.share - 1) < 1e-3 and move.rest_alone < MAX_UNEXPLAINED
