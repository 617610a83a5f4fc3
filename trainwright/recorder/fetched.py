"""Batches that data loaders returned and that no forward call has read yet."""

from __future__ import annotations

from collections import deque

from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.program import Ids, tensors_of

REMEMBERED = 16
"""Maximum number of recorded batches. A trainer that prefetches is a few batches ahead."""


class FetchedBatches:
    """Finds the batch that a forward call reads, by memory that both share. ``waited_s`` is the time spent fetching."""

    def __init__(self) -> None:
        self.batches: deque[tuple[Ids, set[int]]] = deque(maxlen=REMEMBERED)
        self.waited_s = 0.0

    def add(self, ids: object, batch: object, wait_s: float) -> None:
        """Records ``batch``, made of the samples ``ids``. The loop waited ``wait_s`` seconds for it."""
        self.waited_s += wait_s
        self.batches.append((_as_ids(ids), _addresses(batch)))

    def take(self, arguments: object) -> Ids:
        """Returns the ids of the batch that shares memory with ``arguments``; else those of the newest batch.

        That batch and all older ones are dropped. Newer ones are kept: many trainers fetch the next batch before they
        use this one.
        """
        addresses = _addresses(arguments)
        found = next((each for each in self.batches if not addresses.isdisjoint(each[1])), self.batches[-1])
        while self.batches.popleft() is not found:
            pass
        return found[0]


def _addresses(value: object) -> set[int]:
    """Returns the storage addresses of all tensors in a batch. A slice has the storage of the full tensor."""
    return {tensor.untyped_storage().data_ptr() for tensor in plain(tensors_of(value, 3))}


def _as_ids(ids: object) -> Ids:
    if isinstance(ids, list | tuple) and all(isinstance(each, int) for each in ids):
        return tuple(ids)
    return (ids,) if isinstance(ids, int) else None
