"""Detects growing counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MIN_RISING_READINGS = 4
"""Number of consecutive readings that must rise. A pool that fills up, or noise, does not do that."""


def rises(values: Sequence[float]) -> bool:
    """Returns True if each value is above the previous one."""
    return all(b > a for a, b in pairwise(values))


def has_grown(counts: Sequence[int], least: int) -> bool:
    """Returns True if the last readings rise by at least ``least`` in all, to more than ever before."""
    last = counts[-MIN_RISING_READINGS:]
    was_there = max(counts[:-MIN_RISING_READINGS], default=0)
    return len(last) == MIN_RISING_READINGS and rises(last) and last[-1] > was_there and last[-1] - last[0] >= least
