"""Detects spikes of the gradient norm, from the norms of the previous steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

WARMUP_STEPS, WINDOW_STEPS, MAX_CONSECUTIVE_SPIKES = 16, 64, 4
"""Steps before the first median; norms in the median; consecutive spikes after which the new level is accepted."""
MIN_SPIKE_DEVIATIONS = 6.0
"""Minimum distance of a spike from the median, in standard deviations of the logarithms. Norms of a noisy run vary by
more than any fixed factor (policy gradients, likelihoods of densities).
"""
MIN_RATIO_TO_WINDOW = 2.0
"""Minimum ratio of a spike to every norm of the window, so that steadily growing norms are not spikes."""
MIN_NORM = 1e-30  # smaller norms count as this one, so that they have a logarithm


class Spike(NamedTuple):
    """One step whose gradient norm, before clipping, is a spike.

    Attributes:
        step: Number of the step.
        grad_norm: Its gradient norm.
        usual: Median of up to 64 previous norms without spikes, updated every 16 steps.
        initial: Median norm of the first 16 steps.
    """

    step: int
    grad_norm: float
    usual: float
    initial: float


class SpikeDetector:
    """Detects a gradient norm of more than ``factor`` times ``Spike.usual``; not in the first 16 steps.

    A spike is also at least 6 standard deviations above ``usual``, estimated from the median absolute deviation of the
    logarithms, and at least twice the largest of these norms. After 4 spikes in a row, high norms count as usual. The
    detector is part of the state of a run, so that a resumed run decides as an uninterrupted one.
    """

    def __init__(self, factor: float = 8.0) -> None:
        self.factor = factor
        self._norms: deque[float] = deque(maxlen=WINDOW_STEPS)
        # logarithms of the norms: recomputing all at each median takes 20 us
        self._logs: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._in_a_row = self._count = 0
        self._usual = self._initial = self._limit = 0.0

    def detect(self, step: int, grad_norm: float) -> Spike | None:
        """Add the finite norm of a step, before clipping; called in order. Returns the spike, if it is one."""
        if not self._usual or grad_norm <= self._limit:
            self._in_a_row = 0
        elif self._in_a_row < MAX_CONSECUTIVE_SPIKES:
            self._in_a_row += 1
            return Spike(step, grad_norm, self._usual, self._initial)
        self._norms.append(grad_norm)
        self._logs.append(_log(grad_norm))
        self._count += 1
        if self._count % WARMUP_STEPS == 0:  # a median takes 10 us
            self._measure()
        return None

    def _measure(self) -> None:
        self._usual = _median(self._norms)
        self._initial = self._initial or self._usual
        usual = _log(self._usual)
        spread = _median([abs(each - usual) for each in self._logs])
        # 1.4826: ratio of the standard deviation to the median absolute deviation of a normal distribution
        noise = math.exp(min(MIN_SPIKE_DEVIATIONS * 1.4826 * spread, 100.0))
        self._limit = max(max(self.factor, noise) * self._usual, MIN_RATIO_TO_WINDOW * max(self._norms))

    def state_dict(self) -> dict[str, Any]:
        return {
            "norms": list(self._norms),
            "in_a_row": self._in_a_row,
            "count": self._count,
            "usual": self._usual,
            "initial": self._initial,
            "limit": self._limit,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the state; does nothing if the run was saved without it."""
        if saved:
            self._norms = deque(saved["norms"], maxlen=WINDOW_STEPS)
            self._logs = deque(map(_log, self._norms), maxlen=WINDOW_STEPS)
            self._in_a_row, self._count = saved["in_a_row"], saved["count"]
            self._usual, self._initial = saved["usual"], saved["initial"]
            self._limit = saved["limit"]


def _log(norm: float) -> float:
    return math.log(max(norm, MIN_NORM))


def _median(values: Iterable[float]) -> float:
    """Return the median of an even number of values; ``statistics.median`` takes three times as long."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half - 1] + ordered[half]) / 2
