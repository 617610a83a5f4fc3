"""The World protocol, with the implementations Solo (one process) and Ranks (several)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Protocol, TypeVar

import torch
from torch import Tensor, distributed

from trainwright.errors import RankError, text_of

T = TypeVar("T")
BUCKET_BYTES = 25 * 2**20
"""Maximum size of one exchange in bytes, as in torch's DistributedDataParallel."""


class World(Protocol):
    """Communication between ranks, as the engine needs it. ``rank`` is 0-based, ``size`` the number of processes.

    Every rank must make the same calls in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def agree(self, value: T | None) -> T | None:
        """Return the value of the first rank whose value is not None, the same on every rank; None if all are None."""
        ...

    def least(self, number: int) -> int:
        """Return the smallest number of all ranks, the same on every rank."""
        ...

    def clock(self) -> float:
        """Return monotonic seconds of rank 0, so that every rank gets the same time."""
        ...

    def gather(self, numbers: Tensor) -> Tensor:
        """Return the ``numbers`` (n,) of every rank, on their device: (size, n)."""
        ...

    def collect(self, value: T) -> list[T]:
        """Return the value of every rank."""
        ...

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks, in place."""
        ...

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by rank 0's, in place."""
        ...

    def to_first(self, value: T) -> list[T] | None:
        """Return the value of every rank on the first rank, and None on the others."""
        ...

    def from_first(self, values: Sequence[T] | None) -> T:
        """Send each rank one of the ``values`` of the first rank, and return this rank's. Other ranks pass None."""
        ...


class Solo:
    """One process, which never communicates."""

    rank = 0
    size = 1
    clock = staticmethod(time.perf_counter)

    def agree(self, value: T | None) -> T | None:
        return value

    def least(self, number: int) -> int:
        return number

    def gather(self, numbers: Tensor) -> Tensor:
        return numbers[None]

    def collect(self, value: T) -> list[T]:
        return [value]

    def sum_(self, tensors: Sequence[Tensor]) -> None: ...
    def copy_first_(self, tensors: Sequence[Tensor]) -> None: ...

    def to_first(self, value: T) -> list[T] | None:
        return [value]

    def from_first(self, values: Sequence[T] | None) -> T:
        assert values is not None
        return values[0]


SOLO = Solo()


class Ranks:
    """The processes of a torch.distributed group (default: all processes), which must have a CPU backend (gloo).

    Tensors on a GPU use the group's backend for that GPU. Raises RankError if another rank is lost.
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
        """Costs an all-reduce of eight bytes; if there is a value, also an exchange of pickled values."""
        if self.least(int(value is None)):
            return None
        return next(each for each in self.collect(value) if each is not None)

    def least(self, number: int) -> int:
        """Costs an all-reduce of eight bytes."""
        one = torch.tensor(number, device="cpu")
        with raising_rank_error("agree on a number"):
            distributed.all_reduce(one, distributed.ReduceOp.MIN, group=self._group)
        return int(one)

    def clock(self) -> float:
        now = torch.tensor(time.perf_counter(), dtype=torch.float64, device="cpu")
        with raising_rank_error("agree on the time"):
            distributed.broadcast(now, group=self._group, group_src=0)
        return float(now)

    def gather(self, numbers: Tensor) -> Tensor:
        gathered = [torch.empty_like(numbers) for _ in range(self.size)]
        with raising_rank_error("gather numbers"):
            distributed.all_gather(gathered, numbers, group=self._group)
        return torch.stack(gathered)

    def collect(self, value: T) -> list[T]:
        values: list[T | None] = [None] * self.size
        with raising_rank_error("gather objects"):
            distributed.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum in buckets, one after the other: the order of summation depends only on the number of ranks."""
        for bucket in buckets_of(tensors):
            flat = flattened(bucket)
            with raising_rank_error("sum gradients"):
                distributed.all_reduce(flat, group=self._group)
            _spread(flat, bucket)

    @torch.no_grad()
    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        for bucket in buckets_of(tensors):
            flat = flattened(bucket)
            with raising_rank_error("copy tensors of rank 0"):
                distributed.broadcast(flat, group=self._group, group_src=0)
            _spread(flat, bucket)

    def to_first(self, value: T) -> list[T] | None:
        values: list[T | None] | None = [None] * self.size if self.rank == 0 else None
        with raising_rank_error("send objects to rank 0"):
            distributed.gather_object(value, values, group=self._group, group_dst=0)
        return values  # type: ignore[return-value]

    def from_first(self, values: Sequence[T] | None) -> T:
        received: list[T | None] = [None]
        with raising_rank_error("receive an object from rank 0"):
            distributed.scatter_object_list(
                received, None if values is None else [*values], group=self._group, group_src=0
            )
        return received[0]  # type: ignore[return-value]

    def from_previous(self, value: T) -> T:
        """Return the value of the rank before this one; rank 0 gets the value of the last rank."""
        received: list[T | None] = [None]
        with raising_rank_error("pass on objects"):
            for is_sending in (True, False) if self.rank % 2 == 0 else (False, True):
                if is_sending:
                    distributed.send_object_list([value], group=self._group, group_dst=(self.rank + 1) % self.size)
                else:
                    distributed.recv_object_list(received, group=self._group, group_src=(self.rank - 1) % self.size)
        return received[0]  # type: ignore[return-value]

    def again(self) -> Ranks:
        """Return the same ranks as a separate group, for exchanges of another thread. Every rank must call it."""
        with raising_rank_error("make a group"):
            return Ranks(distributed.new_group(distributed.get_process_group_ranks(self.group), backend="gloo"))


def buckets_of(tensors: Sequence[Tensor], max_bytes: int | None = None) -> Iterator[list[Tensor]]:
    """Yield groups of consecutive tensors of one dtype and device, of at most ``max_bytes`` or a single tensor."""
    max_bytes = BUCKET_BYTES if max_bytes is None else max_bytes
    for _, alike in groupby(tensors, key=lambda each: (each.dtype, each.device)):
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > max_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def flattened(bucket: Sequence[Tensor]) -> Tensor:
    """Return one tensor of all elements: a copy, unless there is a single contiguous tensor."""
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
_begun_s: dict[int, float] = {}
"""Time at which the current exchange of each thread began."""


def exchanged_s() -> float:
    """Return the seconds that this thread has spent in exchanges of the ranks, most of them waiting for the slowest."""
    return _exchanged.seconds


def waiting_s() -> float:
    """Return the longest time for which a thread of this process has been in an exchange."""
    now_s = time.perf_counter()
    return max((now_s - begin_s for begin_s in [*_begun_s.values()]), default=0.0)


@contextmanager
def raising_rank_error(what: str) -> Iterator[None]:
    """Context of an exchange. Raises RankError if it fails, and adds its time to ``exchanged_s``."""
    begin_s = _begun_s[threading.get_ident()] = time.perf_counter()
    try:
        yield
        _exchanged.seconds += time.perf_counter() - begin_s
    except RuntimeError as error:  # gloo: connection closed by peer, timed out; NCCL: its DistBackendError
        raise lost_rank(what, error) from error
    finally:
        _begun_s.pop(threading.get_ident(), None)


def lost_rank(what: str, error: RuntimeError) -> RankError:
    """Return the error of an exchange that failed."""
    return RankError(
        f"the ranks could not {what}: {text_of(error)[:300]}",
        remedy="another rank has ended or hangs: its own output says why; then resume the run",
    )


def is_of_exchange(error: RuntimeError) -> bool:
    """Return True if the error comes from an exchange, such as one of torch in a forward or backward pass."""
    return isinstance(error, distributed.DistError) or "/gloo/" in text_of(error)


def from_first_rank(world: World, mine: T) -> T:
    """Return the value of the first rank, on every rank."""
    agreed = world.agree(mine)
    assert agreed is not None
    return agreed
