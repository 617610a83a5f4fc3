"""Keeps the number of the step in progress in the run's lock, so that a kill leaves it behind."""

from __future__ import annotations

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult
from trainwright.runs.lock import RunLock


class Heartbeat:
    """An Observer; costs about 2 us a step.

    A step is in progress until the observers have seen it: its evaluation belongs to it, its saving to the next one.
    """

    def __init__(self, lock: RunLock, state: TrainState) -> None:
        self._lock = lock
        lock.beat(state.step + 1)

    def observe(self, result: StepResult, state: TrainState) -> None:
        self._lock.beat(result.step + 1)

    def close(self) -> None:
        """The lock belongs to whoever acquired it."""
