"""A fair share of a dataset, read in a few seconds without a trace: what its samples are, as arrays."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from trainwright.build.data import Unwrapped
from trainwright.state.rng import preserved_rng, seed_all

BLOCK = 32
"""Samples that are read in a row: neighbours in the dataset tell of labels that are shifted."""
TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys of a mapping that hold what is to be predicted."""
MOST_FEATURES = 4096
MOST_BYTES = 2**28


@dataclass(frozen=True)
class Item:
    """One sample: its position, the tensors that go in, and what is to be predicted (None where nobody can say)."""

    id: int
    inputs: tuple[Tensor, ...]
    target: Tensor | None
    mark: str = ""


@dataclass
class DatasetSample:
    """What was read of a dataset of ``size`` samples (None: a stream) in ``seconds``, of reading alone.

    ``failed`` is the first sample that could not be read, and why. ``random``: reading a sample twice gives two things.
    """

    size: int | None
    items: list[Item] = field(default_factory=list)
    seconds: float = 0.0
    failed: tuple[int, str] | None = None
    random: bool = False

    @property
    def whole(self) -> bool:
        """Whether every sample was read."""
        return self.size is not None and len(self.items) == self.size

    @property
    def tokens(self) -> bool:
        """Whether the inputs are rows of ids."""
        first = self.items[0].inputs[0] if self.items and self.items[0].inputs else None
        return first is not None and first.dim() >= 1 and first.dtype in (torch.int32, torch.int64)

    def labels(self) -> NDArray[np.int64] | None:
        """Classes (n,), where every target is one whole number."""
        targets = [item.target for item in self.items]
        if not targets or any(t is None or t.numel() != 1 or t.is_floating_point() or t.is_complex() for t in targets):
            return None
        return np.array([int(t) for t in targets if t is not None], dtype=np.int64)

    def numbers(self) -> NDArray[np.float64] | None:
        """Targets (n, d) of real numbers, of one shape."""
        targets = [item.target for item in self.items]
        if not targets or any(t is None or not t.is_floating_point() for t in targets):
            return None
        flat = [t.detach().double().flatten().numpy() for t in targets if t is not None]
        return np.stack(flat) if len({len(each) for each in flat}) == 1 and len(flat[0]) <= MOST_FEATURES else None

    def features(self) -> NDArray[np.float64] | None:
        """Inputs (n, d) side by side, thinned to a few thousand; None for tokens and where shapes differ."""
        if not self.items or self.tokens or not self.items[0].inputs:
            return None
        if len({tuple(x.shape for x in item.inputs) for item in self.items}) > 1:
            return None
        rows = []
        for item in self.items:
            flat = [x.detach().flatten() for x in item.inputs]
            rows.append(torch.cat([x[:: max(1, -(-len(x) // MOST_FEATURES))].double() for x in flat]).numpy())
        return np.stack(rows)


def read(data: Unwrapped, *, most: int, budget_s: float, seed: int = 0) -> DatasetSample:
    """Blocks of neighbours from all over the dataset, at most ``most`` samples; random numbers are put back.

    Of a stream nothing is read: that would use its first samples up.
    """
    dataset = data.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return DatasetSample(None)
    read_ = DatasetSample(len(dataset))
    with preserved_rng():
        seed_all(seed)
        begin_s, size = time.perf_counter(), 0
        for position in islice(_positions(len(dataset), most), most):
            if not _read_one(dataset, position, read_) or time.perf_counter() - begin_s > budget_s:
                break
            size += sum(x.nbytes for x in read_.items[-1].inputs)
            if size > MOST_BYTES:
                break
        read_.seconds = time.perf_counter() - begin_s
        if read_.items and read_.failed is None:
            read_.random = any(_mark(_parts(dataset[item.id])[0]) != item.mark for item in read_.items[:4])
    read_.items.sort(key=lambda item: item.id)
    return read_


def thinned(samples: DatasetSample, most: int) -> DatasetSample:
    """At most so many of them, in whole blocks from all over."""
    blocks: dict[int, list[Item]] = {}
    for item in samples.items:
        blocks.setdefault(item.id // BLOCK, []).append(item)
    every = max(1, -(-len(samples.items) // most))
    items = [item for block in list(blocks.values())[::every] for item in block]
    return replace(samples, items=items[:most])


def _read_one(dataset: Any, position: int, into: DatasetSample) -> bool:
    try:
        inputs, target = _parts(dataset[position])
    except Exception as error:
        into.failed = (position, f"{type(error).__name__}: {error}")
        return False
    into.items.append(Item(position, inputs, target, _mark(inputs)))
    return True


def _positions(size: int, most: int) -> Iterator[int]:
    """All of a small dataset; else whole blocks in a fixed random order, the first block first."""
    if size <= most:
        yield from range(size)
        return
    blocks = -(-size // BLOCK)
    chosen = np.random.default_rng(size).permutation(blocks)[: -(-most // BLOCK)] if blocks < 10**7 else None
    starts = chosen if chosen is not None else np.random.default_rng(size).integers(0, blocks, -(-most // BLOCK))
    for block in dict.fromkeys([0, *starts.tolist()]):
        yield from range(block * BLOCK, min(size, (block + 1) * BLOCK))


def _parts(raw: Any) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(inputs, target) of a sample: of a sequence the last is the target, of a mapping what is named like one."""
    if isinstance(raw, Mapping):
        key = next((name for name in TARGETS if name in raw), None)
        inputs = [_tensor(value) for name, value in raw.items() if name != key]
        target = _tensor(raw[key]) if key is not None else None
    elif isinstance(raw, tuple | list) and len(raw) > 1:
        *first, last = raw
        inputs, target = [_tensor(value) for value in first], _tensor(last)
    else:
        inputs, target = [_tensor(raw)], None
    return tuple(x for x in inputs if x is not None), target


def _tensor(value: Any) -> Tensor | None:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        return None  # text, an image, something nested: whoever collates it knows


def _mark(inputs: tuple[Tensor, ...]) -> str:
    """Equal for equal inputs."""
    digest = hashlib.blake2b(digest_size=16)
    for x in inputs:
        digest.update(f"{x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return digest.hexdigest()
