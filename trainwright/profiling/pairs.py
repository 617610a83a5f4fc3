"""Two ways of doing the same, timed in turn: how many times as fast one is, with a bound that noise does not cross."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ERROR = 0.025
"""Chance that the bound is above the true median where one is as fast as the other."""
GAIN = 1.03
"""Times as fast that the bound must be at least: below it nobody would change anything."""
ROUNDS, FEWEST = 9, 6


@dataclass(frozen=True)
class SpeedUp:
    """The median of the rounds and its lower bound; ``noise``: by how much equal blocks differed, at the median."""

    median: float
    at_least: float
    noise: float
    rounds: int

    @property
    def is_proven(self) -> bool:
        """Whether it is faster."""
        return self.at_least >= GAIN


def compared(one: Callable[[], float], other: Callable[[], float], rounds: int = ROUNDS) -> SpeedUp:
    """Times both in blocks, in the order one, other, other, one: a drift of the machine falls on both alike."""
    ratios, noise = [], []
    for _ in range(rounds):
        first, second, third, fourth = one(), other(), other(), one()
        ratios.append((first + fourth) / (second + third))
        noise.append(abs(math.log(first / fourth)))
    return speed_up(ratios, noise)


def speed_up(ratios: Sequence[float], noise: Sequence[float]) -> SpeedUp:
    """The order statistic below which the median lies in at most ``ERROR`` of all cases, whatever the distribution."""
    ordered = sorted(ratios)
    return SpeedUp(
        statistics.median(ordered), ordered[_rank(len(ordered))], math.expm1(statistics.median(noise)), len(ordered)
    )


def _rank(count: int) -> int:
    """The greatest index i for which P(Binomial(count, 1/2) <= i) <= ERROR. Needs six rounds."""
    assert count >= FEWEST
    below, index = 0.5**count, 0
    while below + math.comb(count, index + 1) * 0.5**count <= ERROR:
        index += 1
        below += math.comb(count, index) * 0.5**count
    return index
