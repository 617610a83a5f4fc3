"""Tests whether the losses of a run still fall beyond their noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainwright.doctor.context import RunContext

MAX_FALLING_SLOPE = -2.0
"""Slope in standard errors below which a fall is significant: 2 % of series without a slope reach it."""
MIN_LOSSES = 8  # Minimum number of losses for a slope


def still_falls(run: RunContext) -> bool:
    """Returns True if the losses of the second half of the run fall by more than their noise explains."""
    losses = [(each.step, each.loss) for each in run.steps if 2 * each.step > run.last_step]
    return slope_in_errors(losses) < MAX_FALLING_SLOPE


def slope_in_errors(points: Sequence[tuple[float, float]]) -> float:
    """Returns the slope of the regression line, in standard errors; 0 if it cannot be estimated."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if len(points) < MIN_LOSSES:
        return 0.0
    middle, mean = (sum(column) / len(points) for column in zip(*points))
    spread = sum((x - middle) ** 2 for x, _ in points)
    slope = sum((x - middle) * (y - mean) for x, y in points) / spread
    left = sum((y - mean - slope * (x - middle)) ** 2 for x, y in points)
    error = math.sqrt(left / (len(points) - 2) / spread)
    return slope / error if error else math.copysign(math.inf, slope) if slope else 0.0
