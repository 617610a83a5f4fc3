"""The World protocol, and SOLO: the null object for a run of one process."""

from __future__ import annotations

import time
from typing import Protocol, TypeVar

T = TypeVar("T")


class World(Protocol):
    """What the engine asks of the ranks. ``rank`` is 0-based, ``size`` the number of processes."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def agree(self, value: T | None) -> T | None:
        """The first rank's non-None value, the same on every rank."""
        ...

    def clock(self) -> float:
        """Monotonic seconds; rank 0 decides, so that every rank sees the same time."""
        ...


class Solo:
    """One process: it agrees with itself and never waits."""

    rank = 0
    size = 1

    def agree(self, value: T | None) -> T | None:
        return value

    def clock(self) -> float:
        return time.perf_counter()


SOLO = Solo()
