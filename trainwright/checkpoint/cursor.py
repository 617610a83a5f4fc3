"""The batch of one optimizer step, and the position in the data after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainwright.checkpoint.codec import StateDict, Tree
from trainwright.checkpoint.rng import RngBag
from trainwright.errors import UsageError

Ids = NDArray[np.int64]
"""Dataset positions, shape (n,)."""


class StreamState(NamedTuple):
    """State of the user's iterator after a batch, and the random state that it draws from.

    Attributes:
        own: Result of the iterator's ``state_dict()``.
        rng: Function that returns this random state. The call takes 50 us and is rarely needed.
        number: Number of batches of the epoch so far.
    """

    own: Tree
    rng: Callable[[], RngBag]
    number: int = 0


class EpochStart(NamedTuple):
    """Random state at the start of a pass over a user's loader, from which its order can be drawn again.

    ``held`` are the states of the generators that loader and samplers hold, as ``data.generators`` finds them.
    """

    rng: RngBag
    held: tuple[Tree, ...]


@dataclass(frozen=True)
class Cursor:
    """Position up to which training has *consumed* the data. Prefetched samples do not count.

    Attributes:
        epoch: Number of completed passes over the dataset.
        position: Number of consumed samples of the current epoch.
        digest: Hash of the samples of the epoch so far; "" if Trainwright determines the order.
        stream: State of a stateful iterator of the user.
        start: Set if the order of the epoch was drawn from the generators of the process.
    """

    epoch: int = 0
    position: int = 0
    digest: str = field(default="", compare=False)
    stream: StreamState | None = field(default=None, compare=False)
    start: EpochStart | None = field(default=None, compare=False)

    def state_dict(self) -> StateDict:
        """Return plain values and tensors, for a checkpoint."""
        stream, start = self.stream, self.start
        own = {"own": stream.own, "rng": stream.rng().state_dict(), "number": stream.number} if stream else None
        begun = {"rng": start.rng.state_dict(), "held": list(start.held)} if start else None
        return {"epoch": self.epoch, "position": self.position, "digest": self.digest, "stream": own, "start": begun}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Tree]) -> Cursor:
        """Invert ``state_dict``. States of older versions lack digest, stream or start, or parts of them."""
        stream = saved.get("stream")
        start = saved.get("start")
        digest = saved.get("digest", "")
        begun = EpochStart(RngBag.from_state_dict(start["rng"]), tuple(start["held"])) if start else None
        if not stream:
            return cls(saved["epoch"], saved["position"], digest, start=begun)
        rng = RngBag.from_state_dict(stream["rng"])
        state = StreamState(stream["own"], lambda: rng, int(stream.get("number", 0)))
        return cls(saved["epoch"], saved["position"], digest, state, begun)


class MicroBatch(NamedTuple):
    """The batch of one forward and backward pass. ``data`` is passed to the loss function."""

    data: Any
    ids: Ids

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.ids)


class BadSample(NamedTuple):
    """A sample that cannot be read: its dataset position, and the error of the dataset as text."""

    id: int
    what: str


@dataclass(frozen=True)
class StepBatch:
    """The batch of one optimizer step on this rank, in micro-batches.

    Attributes:
        micro: The micro-batches.
        cursor: Position in the data after this batch has been trained on.
        bad: Unreadable samples found while this batch was read. They are left out, and quarantined after its step.
        of_all: Dataset positions of all ranks; None on a single rank.
        read_s: Time that the reading processes spent, in seconds; 0 for ready-made batches.
    """

    micro: tuple[MicroBatch, ...]
    cursor: Cursor = Cursor()
    bad: tuple[BadSample, ...] = ()
    of_all: Ids | None = None
    read_s: float = field(default=0.0, compare=False)

    @property
    def data(self) -> Any:
        """The data of the only micro-batch. Raises UsageError if there are several."""
        if len(self.micro) != 1:
            raise UsageError(
                f"the batch has {len(self.micro)} micro-batches, and .data needs a batch of only one",
                remedy="go over batch.micro, whose members have .data each, or ask for accumulation=1",
            )
        return self.micro[0].data

    @cached_property
    def size(self) -> int:
        """Number of samples on this rank."""
        return sum([len(micro.ids) for micro in self.micro])

    @property
    def global_ids(self) -> Ids:
        """Dataset positions of the samples of all ranks, shape (n,)."""
        return self.ids if self.of_all is None else self.of_all

    @cached_property
    def tokens(self) -> int:
        """Number of token ids in the inputs; 0 for other inputs."""
        return sum([count_tokens(data) for data, ids in self.micro if len(ids)])

    @property
    def ids(self) -> Ids:
        """Dataset positions of all samples, in the order of training, shape (size,)."""
        return self.micro[0].ids if len(self.micro) == 1 else np.concatenate([micro.ids for micro in self.micro])

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Every tensor of the batch that has a version counter, in order."""
        return [each for micro in self.micro for each in tensors_in(micro.data) if not each.is_inference()]

    @property
    def versions(self) -> list[int]:
        """Version counter (number of in-place writes) of each tensor."""
        return [each._version for each in self.tensors]


def tensors_in(data: object) -> list[Tensor]:
    """Return every tensor of a batch of any nesting."""
    if isinstance(data, Tensor):
        return [data]
    found: list[Tensor] = []
    if isinstance(data, tuple | list):  # first: isinstance with the abstract Mapping is slow
        for each in data:  # runs in each step, so a flat batch needs no call per tensor
            if isinstance(each, Tensor):
                found.append(each)
            else:
                found += tensors_in(each)
        return found
    return tensors_in(list(data.values())) if isinstance(data, Mapping) else found


def count_rows(data: object) -> int | None:
    """Return the number of samples in a ready-made batch: the first dimension, if all its tensors agree; else None.

    A batch of graphs may define it as ``num_graphs``.
    """
    if type(data) is not tuple and isinstance(graphs := getattr(data, "num_graphs", None), int):
        return graphs
    lengths = {tensor.shape[0] for tensor in tensors_in(data) if tensor.dim()}  # len(tensor) takes ten times as long
    return lengths.pop() if len(lengths) == 1 else None


def count_tokens(data: Any) -> int:
    """Return the number of token ids in the inputs of a batch; 0 for other inputs.

    Token ids are int32 or int64 tensors of two dimensions. ``input_ids`` of a mapping may have any number of
    dimensions. In a tuple or list the first tensor of two or more dimensions is the input, because later integers are
    targets, such as the classes of pixels. A mapping has no order, so any of its tensors except ``labels`` may be the
    input.
    """
    if isinstance(data, Tensor):
        return data.numel() if data.dim() == 2 and data.dtype in (torch.int32, torch.int64) else 0
    if isinstance(data, tuple | list):
        for each in data:  # runs in each step, and next() of a generator takes twice the time
            if (number := count_tokens(each)) or (isinstance(each, Tensor) and each.dim() >= 2):
                return number
        return 0
    if not isinstance(data, Mapping):
        return 0
    if isinstance(ids := data.get("input_ids"), Tensor):
        return ids.numel()
    return max([count_tokens(each) for name, each in data.items() if name != "labels"], default=0)
