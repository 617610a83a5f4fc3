"""Which samples each worker process is reading, in memory that it shares with the trainer: a dead one cannot say."""

from __future__ import annotations

import os
from collections.abc import MutableSequence
from multiprocessing.sharedctypes import RawArray

from torch.utils.data import get_worker_info


class InProgress:
    """A worker writes its own entry only, at about 0.3 us a sample; in the trainer nothing is noted."""

    def __init__(self, workers: int) -> None:
        self._pid, self._first, self._count = _shared(workers), _shared(workers), _shared(workers)

    def start(self) -> None:
        """This process is a worker and begins."""
        if info := get_worker_info():
            self._pid[info.id] = os.getpid()

    def begin(self, first: int, count: int = 1) -> None:
        """``count`` samples are read now, all at once; 0: they have been read."""
        if self._first and (info := get_worker_info()):
            self._first[info.id], self._count[info.id] = first, count

    def of(self, pid: int | None) -> tuple[int, int]:
        """The first sample and how many a process reads; the number is 0 where it reads none."""
        pids = list(self._pid)
        worker = pids.index(pid) if pid in pids else None
        return (-1, 0) if worker is None else (self._first[worker], self._count[worker])


def _shared(size: int) -> MutableSequence[int]:
    numbers: MutableSequence[int] = RawArray("q", size) if size else []
    return numbers
