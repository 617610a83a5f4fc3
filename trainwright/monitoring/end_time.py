"""Prints the predicted end of a run once, when its pace is known. The dry run predicted it from a few steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult

STEPS_BEFORE_PREDICTION = 50
"""Steps of this process before the prediction. The first ten are slower and do not count."""
MIN_SECONDS_LEFT = 2.0
"""Remaining seconds below which nothing is printed."""

SecondsLeft = Callable[[TrainState], float | None]
"""Returns the remaining wall-clock seconds of a run; None if unknown."""


class EndTime:
    """An observer. ``seconds_left`` is called once; ``line`` makes the text of step_s, seconds left and unix time."""

    def __init__(
        self,
        seconds_left: SecondsLeft,
        line: Callable[[float, float, float], str],
        say: Callable[[str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._left_over = seconds_left
        self._line = line
        self._say = say
        self._wall_clock = wall_clock
        self._count, self._steps_s = 0, 0.0

    def observe(self, result: StepResult, state: TrainState) -> None:
        self._count += 1
        if self._count > STEPS_BEFORE_PREDICTION:
            return
        if self._count > STEPS_BEFORE_PREDICTION // 5:
            self._steps_s += result.step_s
        if self._count == STEPS_BEFORE_PREDICTION:
            step_s = self._steps_s / (STEPS_BEFORE_PREDICTION - STEPS_BEFORE_PREDICTION // 5)
            left_s = self._left_over(state)
            if left_s is not None and left_s > MIN_SECONDS_LEFT:
                self._say(f"step {result.step:>6}   {self._line(step_s, left_s, self._wall_clock())}")

    def close(self) -> None: ...
