"""The batches that data loaders returned and that no forward call has read yet."""

from __future__ import annotations

from collections import deque

from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.program import Ids, tensors_of

REMEMBERED = 16
"""Fetched batches that are remembered: a trainer that prefetches is a few ahead."""


class FetchedBatches:
    """Finds the batch that a call reads by the memory of its tensors. ``waited_s`` is the time spent on fetching."""

    def __init__(self) -> None:
        self.batches: deque[tuple[Ids, set[int]]] = deque(maxlen=REMEMBERED)
        self.waited_s = 0.0

    def add(self, ids: object, batch: object, wait_s: float) -> None:
        """A loader has returned ``batch``, made of the samples ``ids``, after ``wait_s`` seconds."""
        self.waited_s += wait_s
        self.batches.append((_as_ids(ids), _addresses(batch)))

    def take(self, arguments: object) -> Ids:
        """The ids of the batch that shares memory with ``arguments``; of the newest one where none does.

        That batch and all older ones are dropped: many trainers fetch the next batch before they use this one.
        """
        addresses = _addresses(arguments)
        found = next((each for each in self.batches if not addresses.isdisjoint(each[1])), self.batches[-1])
        while self.batches.popleft() is not found:
            pass
        return found[0]


def _addresses(value: object) -> set[int]:
    """Addresses of the storages of all tensors in a batch: a slice of a tensor has the storage of the whole."""
    return {tensor.untyped_storage().data_ptr() for tensor in plain(tensors_of(value, 3))}


def _as_ids(ids: object) -> Ids:
    if isinstance(ids, list | tuple) and all(isinstance(each, int) for each in ids):
        return tuple(ids)
    return (ids,) if isinstance(ids, int) else None
