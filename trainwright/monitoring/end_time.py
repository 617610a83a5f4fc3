"""Says once, when a run has found its pace, when it will end: the dry run predicted it from a few steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult

STEPS = 50
"""After so many steps of this process it is said; the first ten, which are slower, do not count."""
UNSAID_S = 2.0
"""Where less than that is left, nothing is said."""

LeftOver = Callable[[TrainState], float | None]
"""Seconds by the clock that are left of a run; None: not known."""


class EndTime:
    """An Observer. ``left_over`` is asked once; ``line`` makes the text: step_s, seconds left, unix time."""

    def __init__(
        self,
        left_over: LeftOver,
        line: Callable[[float, float, float], str],
        say: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._left_over, self._line, self._say, self._wall_clock = left_over, line, say, wall_clock
        self._count, self._steps_s = 0, 0.0

    def observe(self, result: StepResult, state: TrainState) -> None:
        self._count += 1
        if self._count > STEPS:
            return
        if self._count > STEPS // 5:
            self._steps_s += result.step_s
        if self._count == STEPS:
            step_s = self._steps_s / (STEPS - STEPS // 5)
            left_s = self._left_over(state)
            if left_s is not None and left_s > UNSAID_S:
                self._say(f"step {result.step:>6}   {self._line(step_s, left_s, self._wall_clock())}")

    def close(self) -> None: ...
