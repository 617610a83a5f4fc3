"""The World protocol; SOLO, the null object for a run of one process; and Ranks, for several."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed
from torch.futures import Future

from trainwright.errors import RankError, text_of

T = TypeVar("T")
BUCKET_BYTES = 25 * 2**20
"""As much is summed in one exchange; torch's DistributedDataParallel takes the same."""


class World(Protocol):
    """What the engine asks of the ranks. ``rank`` is 0-based, ``size`` the number of processes.

    Every rank must make the same calls in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def agree(self, value: T | None) -> T | None:
        """The first rank's non-None value, the same on every rank."""
        ...

    def least(self, number: int) -> int:
        """The smallest number of all ranks, the same on every rank."""
        ...

    def clock(self) -> float:
        """Monotonic seconds; rank 0 decides, so that every rank sees the same time."""
        ...

    def gather(self, numbers: Tensor) -> Tensor:
        """The ``numbers`` (n,) of every rank, on their device: (size, n)."""
        ...

    def collect(self, value: T) -> list[T]:
        """The value of every rank."""
        ...

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sums each tensor over all ranks, in place."""
        ...

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Makes each tensor what it is on rank 0, in place."""
        ...

    def bring(self, tensor: Tensor, source: int) -> None:
        """Makes ``tensor`` on rank 0 what it is on rank ``source``, in place. The other ranks need not call it."""
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

    def gather(self, numbers: Tensor) -> Tensor:
        return numbers[None]

    def collect(self, value: T) -> list[T]:
        return [value]

    def sum_(self, tensors: Sequence[Tensor]) -> None: ...
    def copy_first_(self, tensors: Sequence[Tensor]) -> None: ...
    def bring(self, tensor: Tensor, source: int) -> None: ...


SOLO = Solo()


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed together, as a communication hook of torch asks for them: its GradBucket."""

    number: int
    flat: Tensor
    shapes: Sequence[torch.Size]
    last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        """All elements, shape (n,); the hook may write into it."""
        return self.flat

    def gradients(self) -> list[Tensor]:
        """Views of the buffer."""
        parts = torch.split(self.flat, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def is_last(self) -> bool:
        return self.last


CommunicationHook: TypeAlias = Callable[[Any], Future[Tensor]]
"""torch's hooks of DistributedDataParallel, with their state: bucket -> the mean of its buffer over the ranks."""


class Ranks:
    """The processes of a group of torch.distributed, by default of all, initialised with a CPU backend (gloo).

    Tensors of a GPU go through the backend that the group has for it. Raises RankError where another rank is gone.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)

    @property
    def group(self) -> distributed.ProcessGroup:
        group = self._group or distributed.group.WORLD
        assert group is not None
        return group

    def agree(self, value: T | None) -> T | None:
        """Costs an all-reduce of eight bytes; where there is a value, an exchange of pickled ones, too."""
        if self.least(int(value is None)):
            return None
        return next(each for each in self.collect(value) if each is not None)

    def least(self, number: int) -> int:
        """Costs an all-reduce of eight bytes."""
        one = torch.tensor(number, device="cpu")
        with _raising_rank_error("agree on a number"):
            distributed.all_reduce(one, distributed.ReduceOp.MIN, group=self._group)
        return int(one)

    def clock(self) -> float:
        now = torch.tensor(time.perf_counter(), dtype=torch.float64, device="cpu")
        with _raising_rank_error("agree on the time"):
            distributed.broadcast(now, group=self._group, group_src=0)
        return float(now)

    def gather(self, numbers: Tensor) -> Tensor:
        gathered = [torch.empty_like(numbers) for _ in range(self.size)]
        with _raising_rank_error("gather numbers"):
            distributed.all_gather(gathered, numbers, group=self._group)
        return torch.stack(gathered)

    def collect(self, value: T) -> list[T]:
        values: list[T | None] = [None] * self.size
        with _raising_rank_error("gather objects"):
            distributed.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """In buckets, one after the other: the order of summation is the same in every run of so many ranks."""
        for bucket in _buckets(tensors):
            flat = _flattened(bucket)
            with _raising_rank_error("sum gradients"):
                distributed.all_reduce(flat, group=self._group)
            _spread(flat, bucket)

    @torch.no_grad()
    def sum_by_(self, hook: CommunicationHook, tensors: Sequence[Tensor]) -> None:
        """As ``sum_``, but what is sent of a bucket is the hook's to decide, which returns the mean over the ranks."""
        buckets = list(_buckets(tensors))
        for index, bucket in enumerate(buckets):
            flat = _flattened(bucket)
            shown = Bucket(index, flat, [each.shape for each in bucket], index + 1 == len(buckets))
            with _raising_rank_error("sum compressed gradients"):
                mean = hook(shown).wait()
            flat.copy_(mean).mul_(self.size)
            _spread(flat, bucket)

    @torch.no_grad()
    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = _flattened(bucket)
            with _raising_rank_error("copy tensors of rank 0"):
                distributed.broadcast(flat, group=self._group, group_src=0)
            _spread(flat, bucket)

    def bring(self, tensor: Tensor, source: int) -> None:
        with _raising_rank_error("bring a tensor to rank 0"):
            if self.rank == source:
                distributed.send(tensor, group=self._group, group_dst=0)
            elif self.rank == 0:
                distributed.recv(tensor, group=self._group, group_src=source)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that follow each other and are of one dtype and device, at most BUCKET_BYTES together."""
    for _, alike in groupby(tensors, key=lambda each: (each.dtype, each.device)):
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _flattened(bucket: Sequence[Tensor]) -> Tensor:
    """One tensor of all elements: a copy, unless there is one tensor that is contiguous."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return bucket[0].detach().view(-1)
    return torch.cat([each.detach().reshape(-1) for each in bucket])


def _spread(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    if flat.data_ptr() == bucket[0].data_ptr():
        return
    parts = torch.split(flat, [each.numel() for each in bucket])
    torch._foreach_copy_(list(bucket), [part.view_as(each) for part, each in zip(parts, bucket, strict=True)])


class _Exchanged(threading.local):
    seconds = 0.0


_exchanged = _Exchanged()


def exchanged_s() -> float:
    """Seconds that this thread has spent in exchanges of the ranks, most of them waiting for the last to come."""
    return _exchanged.seconds


@contextmanager
def _raising_rank_error(what: str) -> Iterator[None]:
    begin_s = time.perf_counter()
    try:
        yield
        _exchanged.seconds += time.perf_counter() - begin_s
    except RuntimeError as error:  # gloo: connection closed by peer, timed out; NCCL: its DistBackendError
        raise lost_rank(what, error) from error


def lost_rank(what: str, error: RuntimeError) -> RankError:
    """The error of an exchange that failed."""
    return RankError(
        f"the ranks could not {what}: {text_of(error)[:300]}",
        remedy="another rank has ended or hangs: its own output says why; then resume the run",
    )


def is_of_exchange(error: RuntimeError) -> bool:
    """Whether it comes from an exchange, such as one that torch makes within a forward or backward pass."""
    return isinstance(error, distributed.DistError) or "/gloo/" in text_of(error)
