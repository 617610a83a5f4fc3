"""Time limits of replays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class ReplayTimeout(BaseException):
    """An experiment has exceeded its time limit.

    It is a BaseException so that neither an experiment nor the user's code handles it as a failure of the step.
    """


class Deadline:
    """Stops replays between two instructions. Outside of ``within`` there is no time limit.

    ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._at_s = math.inf
        self.extended: Callable[[], AbstractContextManager[object]] = nullcontext
        """Context with more time for an experiment that has found a fault, to measure and place it."""

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Context in which ``check`` raises after ``seconds``."""
        before, self._at_s = self._at_s, self._clock() + seconds
        try:
            yield
        finally:
            self._at_s = before

    def check(self) -> None:
        """Raises ReplayTimeout after the deadline."""
        if self._at_s != math.inf and self._clock() > self._at_s:
            raise ReplayTimeout
