"""Signals as an Observer: asked to stop, a run ends at the edge of the step and is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainwright.engine.loop import Stop
from trainwright.engine.step import StepResult
from trainwright.state.train_state import TrainState

PREEMPTED = 75
WATCHED = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Signals:
    """From ``listen`` to ``close``: SIGINT, SIGTERM and SIGUSR1 set a flag; the step at hand is finished first.

    A second one of them ends the process at once (KeyboardInterrupt). Outside the main thread it does nothing, for
    Python delivers no signals there.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Takes the signals over."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in WATCHED}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        self._say(f"{signal.Signals(number).name}: saving at the end of this step; once more quits at once")

    def observe(self, result: StepResult, state: TrainState) -> Stop | None:
        if self.received is None:
            return None
        return Stop(signal.Signals(self.received).name, save=True, exit_code=PREEMPTED)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
