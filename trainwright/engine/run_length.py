"""The length of a run: the used fraction as a function of the state."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainwright.checkpoint.train_state import TrainState
from trainwright.errors import UsageError

Until = Callable[[TrainState], float]
"""Returns the used fraction of the run: 0 at its start, 1 at its end."""


def for_steps(count: int) -> Until:
    """Return the length of a run of ``count`` optimizer steps."""
    return _until(count, lambda state: state.step / count)


def for_seconds(budget_s: float) -> Until:
    """Return the length of a run of ``budget_s`` seconds of training; evaluation and saving are not counted."""
    return _until(budget_s, lambda state: state.elapsed_s / budget_s)


class ByTheClock:
    """A run that ends, including all work after its last step, within ``within_s`` seconds of ``clock`` from now.

    Work between the steps (evaluation, examinations, samples) reduces the time for training. ``after_s`` is the known
    duration of the work after the last step. In addition, time is reserved for the longest pause so far and the pause
    before the first step. Trains for at least ``MIN_TRAINING_S``.
    """

    MIN_TRAINING_S = 1.0

    def __init__(self, within_s: float, after_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._after_s, self._clock = after_s, clock
        self._now_s = self._begin_s = clock()
        self._end_s = self._begin_s + within_s
        self._elapsed_s: float | None = None
        self._first_s = self._longest_s = self._begins_at_s = self._used = 0.0

    @property
    def left_s(self) -> float:
        """Seconds by the clock until the run must be over."""
        return max(0.0, self._end_s - self._clock())

    def __call__(self, state: TrainState) -> float:
        now_s = self._clock()
        if self._elapsed_s is None:
            self._begins_at_s, self._first_s = state.elapsed_s, now_s - self._begin_s
        else:
            self._longest_s = max(self._longest_s, now_s - self._now_s - (state.elapsed_s - self._elapsed_s))
        self._now_s, self._elapsed_s = now_s, state.elapsed_s
        left_s = self._end_s - self._after_s - self._first_s - self._longest_s - now_s
        left_s = max(left_s, self._begins_at_s + self.MIN_TRAINING_S - state.elapsed_s, 0.0)
        # the fraction never decreases
        self._used = max(self._used, state.elapsed_s / max(state.elapsed_s + left_s, 1e-9))
        return self._used


def _until(amount: float, until: Until) -> Until:
    if not amount > 0:
        raise UsageError(f"a run lasts longer than {amount!r}", remedy="write for_steps(1000) or for_seconds(60)")
    return until
