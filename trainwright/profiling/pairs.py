"""Compares two implementations by alternating timings: the speed-up, and a lower bound that accounts for noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_ERROR_PROBABILITY = 0.025
"""Probability that the bound is above the true median if both are equally fast."""
MIN_SPEED_UP = 1.03
"""Minimum speed-up of the bound that counts as a gain; a smaller one is not worth a change."""
ROUNDS, MIN_ROUNDS = 9, 6


@dataclass(frozen=True)
class SpeedUp:
    """The median of the rounds and its lower bound; ``noise`` is the median difference of equal blocks."""

    median: float
    at_least: float
    noise: float
    rounds: int

    @property
    def is_proven(self) -> bool:
        """True if it is faster."""
        return self.at_least >= MIN_SPEED_UP


def compare_timings(one: Callable[[], float], other: Callable[[], float], rounds: int = ROUNDS) -> SpeedUp:
    """Time both in blocks, in the order one, other, other, one, so that drift of the machine affects both equally."""
    ratios, noise = [], []
    for _ in range(rounds):
        first, second, third, fourth = one(), other(), other(), one()
        ratios.append((first + fourth) / (second + third))
        noise.append(abs(math.log(first / fourth)))
    return speed_up(ratios, noise)


def speed_up(ratios: Sequence[float], noise: Sequence[float]) -> SpeedUp:
    """Return the order statistic below which the median lies in at most ``MAX_ERROR_PROBABILITY`` of all cases, for any
    distribution.
    """
    ordered = sorted(ratios)
    return SpeedUp(
        statistics.median(ordered), ordered[_rank(len(ordered))], math.expm1(statistics.median(noise)), len(ordered)
    )


def _rank(count: int) -> int:
    """Return the greatest index i for which P(Binomial(count, 1/2) <= i) <= MAX_ERROR_PROBABILITY. Needs six rounds."""
    assert count >= MIN_ROUNDS
    below, index = 0.5**count, 0
    while below + math.comb(count, index + 1) * 0.5**count <= MAX_ERROR_PROBABILITY:
        index += 1
        below += math.comb(count, index) * 0.5**count
    return index
