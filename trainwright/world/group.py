"""The World protocol; SOLO, the null object for a run of one process; and Ranks, for several."""

from __future__ import annotations

import time
from typing import Protocol, TypeVar

import torch
from torch import distributed

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

    def least(self, number: int) -> int:
        """The smallest number of all ranks, the same on every rank; each must ask."""
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

    def least(self, number: int) -> int:
        return number

    def clock(self) -> float:
        return time.perf_counter()


SOLO = Solo()


class Ranks:
    """The processes of torch.distributed's default group, which must be initialised, over a CPU backend (gloo)."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def agree(self, value: T | None) -> T | None:
        """Costs an exchange of pickled values: about a millisecond on one machine."""
        values: list[T | None] = [None] * self.size
        distributed.all_gather_object(values, value)
        return next((each for each in values if each is not None), None)

    def least(self, number: int) -> int:
        """Costs an all-reduce of eight bytes."""
        one = torch.tensor(number)
        distributed.all_reduce(one, distributed.ReduceOp.MIN)
        return int(one)

    def clock(self) -> float:
        now: list[float] = [time.perf_counter()]
        distributed.broadcast_object_list(now)
        return now[0]
