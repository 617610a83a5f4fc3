"""Whether what is counted at some steps grows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

READINGS = 4
"""Readings that must rise one after the other: a pool that is filled, or noise, does not do that."""


def rises(values: Sequence[float]) -> bool:
    """Each is above the one before."""
    return all(b > a for a, b in pairwise(values))


def has_grown(counts: Sequence[int], least: int) -> bool:
    """The last readings rise, by ``least`` in all, above all earlier ones: an earlier epoch may have had as many."""
    last = counts[-READINGS:]
    was_there = max(counts[:-READINGS], default=0)
    return len(last) == READINGS and rises(last) and last[-1] > was_there and last[-1] - last[0] >= least
