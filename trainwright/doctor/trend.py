"""Whether the losses of a run still go down beyond their own noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainwright.doctor.context import RunContext

FALLS = -2.0
"""Standard errors of a slope, below which it is no chance: 2 % of series without a slope."""
LEAST = 8
"""Losses that a slope is told from."""


def still_falls(run: RunContext) -> bool:
    """Whether the losses of the second half of the run go down by more than their noise explains."""
    losses = [(each.step, each.loss) for each in run.steps if 2 * each.step > run.last_step]
    return slope_in_errors(losses) < FALLS


def slope_in_errors(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the straight line through these points, in standard errors of it; 0 where it cannot be told."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if len(points) < LEAST:
        return 0.0
    middle, mean = (sum(column) / len(points) for column in zip(*points))
    spread = sum((x - middle) ** 2 for x, _ in points)
    slope = sum((x - middle) * (y - mean) for x, y in points) / spread
    left = sum((y - mean - slope * (x - middle)) ** 2 for x, y in points)
    error = math.sqrt(left / (len(points) - 2) / spread)
    return slope / error if error else math.copysign(math.inf, slope) if slope else 0.0
