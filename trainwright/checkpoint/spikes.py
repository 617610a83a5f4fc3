"""Finds gradient norms that are far out of line, from the norms of the steps before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

WARM, WINDOW, ACCEPTED = 16, 64, 4
"""Steps before the first median, norms that it is taken of, and spikes in a row after which the level is accepted."""
DEVIATIONS = 6.0
"""How far above the median a spike lies, in standard deviations of the logarithms: norms of a noisy run vary by more
than any fixed factor (policy gradients, likelihoods of densities)."""
BEYOND = 2.0
"""A spike is larger than this many times every norm of the window: where norms grow, the next is no surprise."""
TINY = 1e-30


class Spike(NamedTuple):
    """One step whose gradient norm, before clipping, is a spike. ``usual`` is the median norm of the last 64 steps.

    ``initial`` is the median norm of the first 16 steps.
    """

    step: int
    grad_norm: float
    usual: float
    initial: float


class SpikeDetector:
    """A gradient norm of more than ``factor`` times the median of the last 64 is a spike; not in the first 16 steps.

    It also lies at least 6 standard deviations above the median, by the median absolute deviation of their logarithms.

    A norm that stays high is no spike: after 4 in a row the new level is accepted. Part of the state of a run, so that
    a resumed run decides as one that was never interrupted.
    """

    def __init__(self, factor: float = 8.0) -> None:
        self.factor = factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._logs: deque[float] = deque(maxlen=WINDOW)  # of these: to take all again at each median costs 20 us
        self._in_a_row = self._count = 0
        self._usual = self._initial = self._limit = 0.0

    def detect(self, step: int, grad_norm: float) -> Spike | None:
        """Takes the finite norm of each step, before clipping, in order."""
        if not self._usual or grad_norm <= self._limit:
            self._in_a_row = 0
        elif self._in_a_row < ACCEPTED:
            self._in_a_row += 1
            return Spike(step, grad_norm, self._usual, self._initial)
        self._norms.append(grad_norm)
        self._logs.append(_log(grad_norm))
        self._count += 1
        if self._count % WARM == 0:  # a median costs 10 us
            self._measure()
        return None

    def detect_all(self, steps: Mapping[int, float]) -> dict[int, Spike]:
        """The same for the norms of several steps, in order; where none is a spike, in a fraction of the time."""
        grad_norms = steps.values()
        is_quiet = self._usual and max(grad_norms, default=0.0) <= self._limit
        if not is_quiet or self._count % WARM + len(steps) > WARM:  # the limit may change between them
            found = {step: self.detect(step, norm) for step, norm in steps.items()}
            return {step: spike for step, spike in found.items() if spike is not None}
        self._in_a_row = 0
        self._norms += grad_norms
        self._logs += map(_log, grad_norms)
        self._count += len(steps)
        if self._count % WARM == 0:
            self._measure()
        return {}

    def _measure(self) -> None:
        self._usual = _median(self._norms)
        self._initial = self._initial or self._usual
        usual = _log(self._usual)
        spread = _median([abs(each - usual) for each in self._logs])
        noise = math.exp(min(DEVIATIONS * 1.4826 * spread, 100.0))  # 1.4826: of a normal distribution
        self._limit = max(max(self.factor, noise) * self._usual, BEYOND * max(self._norms))

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
        """Nothing where the run was saved without."""
        if saved:
            self._norms = deque(saved["norms"], maxlen=WINDOW)
            self._logs = deque(map(_log, self._norms), maxlen=WINDOW)
            self._in_a_row, self._count = saved["in_a_row"], saved["count"]
            self._usual, self._initial = saved["usual"], saved["initial"]
            self._limit = saved["limit"]


def _log(norm: float) -> float:
    return math.log(max(norm, TINY))


def _median(values: Iterable[float]) -> float:
    """Of an even number of values; ``statistics.median`` takes three times as long."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half - 1] + ordered[half]) / 2
