"""The time at which a replay must stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeIsUp(BaseException):
    """An experiment has used the time that it may take.

    A BaseException: neither an experiment nor the user's code takes it for a failure of the replayed step.
    """


class Deadline:
    """Stops replays between two instructions. Without ``within`` they may take as long as they need.

    ``clock`` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._at_s = math.inf

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """A context in which ``check`` raises after ``seconds``."""
        before, self._at_s = self._at_s, self._clock() + seconds
        try:
            yield
        finally:
            self._at_s = before

    def check(self) -> None:
        """Raise TimeIsUp when the time is over."""
        if self._at_s != math.inf and self._clock() > self._at_s:
            raise TimeIsUp
