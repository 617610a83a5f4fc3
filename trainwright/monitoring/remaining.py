"""Measures the times of steps, evaluations, examinations and saves, and corrects the predicted end of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult


@dataclass(frozen=True)
class Measured:
    """Measurements from at least the newer half of a run so far.

    Args:
        step_s: Seconds of a step, with the wait for its batch.
        evaluation_s: Seconds of the last evaluation; None before the first.
        examination_s: Seconds of the doctor per step.
        examined_s: Total seconds of the doctor.
        beside_s: Other seconds per step: log, telemetry, saves.
    """

    step_s: float
    evaluation_s: float | None
    examination_s: float
    examined_s: float
    beside_s: float


class _Sums(NamedTuple):
    steps: int = 0
    steps_s: float = 0.0
    examined_s: float = 0.0
    beside_s: float = 0.0


class TimeSpent:
    """An observer that adds up the components of the time between two steps.

    ``examined_s`` returns the total seconds of the doctor. The first steps are slower and are examined more often, so
    the measured steps begin at a power of two and are at least the newer half.
    """

    def __init__(self, examined_s: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> None:
        self._examined_s, self._clock = examined_s, clock
        self._sums = self._mark = self._next_mark = _Sums()
        self._last_s: float | None = None
        self._evaluation_s: float | None = None

    def observe(self, result: StepResult, _state: TrainState) -> None:
        now_s, examined_s = self._clock(), self._examined_s()
        evaluated_s = 0.0
        if result.evaluation is not None:
            self._evaluation_s = evaluated_s = result.evaluation.seconds
        before, beside_s = self._sums, 0.0
        if self._last_s is not None:
            between_s = now_s - self._last_s - result.step_s - evaluated_s
            beside_s = max(0.0, between_s - (examined_s - before.examined_s))
        self._last_s = now_s
        steps = before.steps + 1
        self._sums = _Sums(steps, before.steps_s + result.step_s, examined_s, before.beside_s + beside_s)
        if steps & (steps - 1) == 0:  # a power of two
            self._mark, self._next_mark = self._next_mark, self._sums

    def measured(self) -> Measured | None:
        """Return the measurements; None before the second step."""
        now, then = self._sums, self._mark
        steps = now.steps - then.steps
        if now.steps < 2:
            return None
        return Measured(
            (now.steps_s - then.steps_s) / steps,
            self._evaluation_s,
            (now.examined_s - then.examined_s) / steps,
            now.examined_s,
            (now.beside_s - then.beside_s) / steps,
        )

    def close(self) -> None: ...


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
