"""Reads a part of a dataset in a few seconds, without side effects, and returns its samples as arrays."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from numbers import Integral

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from trainwright.checkpoint.rng import preserved_rng, seed_all
from trainwright.data.fork import Begin, TooSlowError, read_in_fork
from trainwright.data.unwrap import Unwrapped, length_of
from trainwright.distributed.threads import undisturbed_s
from trainwright.errors import DataError, text_of

BLOCK_SAMPLES = 32
"""Consecutive samples that are read together: neighbours in the dataset reveal shifted labels."""
TARGETS = ("labels", "label", "targets", "target", "y")
"""Keys of a mapping that hold the target."""
MAX_FEATURES = 4096
MAX_BYTES = 2**28
SAMPLE_TIMEOUT_S = 10.0
"""Seconds that one sample may take in addition to the time budget of all samples."""


@dataclass(frozen=True)
class SampleItem:
    """One sample: its position, input tensors, target (None if unknown), and a digest of the inputs."""

    id: int
    inputs: tuple[Tensor, ...]
    target: Tensor | None
    digest: str = ""


@dataclass
class DatasetSample:
    """The samples that were read from a dataset of ``size`` samples (None for a stream).

    ``seconds`` is the time for reading them, without interruptions by other processes. ``failed`` is the first sample
    that could not be read, and the reason. ``fatal`` is True if it ended or blocked the process that read it, so that
    it must not be read in this one. ``random`` is True if two readings of a sample differ. The caller excluded
    ``left_out`` samples.
    """

    size: int | None
    items: list[SampleItem] = field(default_factory=list)
    seconds: float = 0.0
    failed: tuple[int, str] | None = None
    fatal: bool = False
    random: bool = False
    left_out: int = 0

    def add(self, part: DatasetSample) -> None:
        """Add samples that were read after these."""
        self.items += part.items
        self.seconds += part.seconds
        self.failed, self.random = part.failed, part.random

    @property
    def is_complete(self) -> bool:
        """True if every sample was read."""
        return self.size is not None and len(self.items) + self.left_out == self.size

    @property
    def has_token_ids(self) -> bool:
        first = self.items[0].inputs[0] if self.items and self.items[0].inputs else None
        return first is not None and first.dim() >= 1 and first.dtype in (torch.int32, torch.int64)

    def labels(self) -> NDArray[np.int64] | None:
        """Return the classes (n,); None unless every target is one integer."""
        targets = [item.target for item in self.items]
        if not targets or any(t is None or t.numel() != 1 or t.is_floating_point() or t.is_complex() for t in targets):
            return None
        return np.array([int(t) for t in targets if t is not None], dtype=np.int64)

    def numbers(self) -> NDArray[np.float64] | None:
        """Return the real targets (n, d); None unless all have one size of at most ``MAX_FEATURES``."""
        targets = [item.target for item in self.items]
        if not targets or any(t is None or not t.is_floating_point() for t in targets):
            return None
        flat = [t.detach().double().flatten().numpy() for t in targets if t is not None]
        return np.stack(flat) if len({len(each) for each in flat}) == 1 and len(flat[0]) <= MAX_FEATURES else None

    def features(self) -> NDArray[np.float64] | None:
        """Return the inputs (n, d), each tensor thinned to ``MAX_FEATURES`` values; None for token ids or different
        shapes.
        """
        if not self.items or self.has_token_ids or not self.items[0].inputs:
            return None
        if len({tuple(x.shape for x in item.inputs) for item in self.items}) > 1:
            return None
        rows = []
        for item in self.items:
            flat = [x.detach().flatten() for x in item.inputs]
            rows.append(torch.cat([x[:: max(1, -(-len(x) // MAX_FEATURES))].double() for x in flat]).numpy())
        return np.stack(rows)


def read(
    data: Unwrapped, *, most: int, budget_s: float, seed: int = 0, left_out: Collection[int] = ()
) -> DatasetSample:
    """Read blocks of neighbours from all over the dataset, at most ``most`` samples, in another process.

    Samples in ``left_out`` are not read. Nothing is read from a stream, because that would consume its first samples.
    """
    dataset = data.dataset
    size = length_of(dataset)
    if size is None or isinstance(dataset, IterableDataset):
        return DatasetSample(None)
    found = DatasetSample(size, left_out=len(left_out))

    def parts(begin: Begin) -> Iterator[DatasetSample]:
        positions = (position for position in _positions(size, most) if position not in left_out)
        return _read(dataset, islice(positions, most), budget_s, seed, begin)

    try:
        for part in read_in_fork(parts, limit_s=budget_s + SAMPLE_TIMEOUT_S):
            found.add(part)
    except DataError as error:
        found.failed, found.fatal = (error.sample_ids[0] if error.sample_ids else 0, error.message), True
    except TooSlowError as error:
        found.failed, found.fatal = (error.position, f"it was not read within {SAMPLE_TIMEOUT_S:g} s"), True
    if found.failed and "CUDA" in found.failed[1]:  # samples on the GPU are read in the process that uses it
        found = DatasetSample(size, left_out=len(left_out))
        with preserved_rng():
            for part in parts(lambda _position: None):
                found.add(part)
    found.items.sort(key=lambda item: item.id)
    return found


def _read(
    dataset: Dataset[object], positions: Iterator[int], budget_s: float, seed: int, begin: Begin
) -> Iterator[DatasetSample]:
    """Yield block after block. The last one reports the sample that failed, or that two readings differ."""
    seed_all(seed)
    begin_s, size, first = time.perf_counter(), 0, list[SampleItem]()
    while size <= MAX_BYTES and time.perf_counter() - begin_s <= budget_s:
        block, block_begin_s = DatasetSample(None), undisturbed_s()
        for position in islice(positions, BLOCK_SAMPLES):
            begin(position)
            try:
                inputs, target = _parts(dataset[position])
            except (Exception, SystemExit) as error:
                block.failed = (position, text_of(error))
                break
            block.items.append(SampleItem(position, inputs, target, _digest(inputs)))
            size += sum(x.nbytes for x in inputs)
            if size > MAX_BYTES or time.perf_counter() - begin_s > budget_s:
                break
        block.seconds = undisturbed_s() - block_begin_s  # without the time to pass the block to the parent
        yield block
        if block.failed:
            return
        if not block.items:
            break
        first = first or block.items[:4]
    random = any(_digest(_parts(dataset[item.id])[0]) != item.digest for item in first)
    yield DatasetSample(None, random=random)


def thinned(samples: DatasetSample, most: int) -> DatasetSample:
    """Return at most ``most`` of the samples, in blocks from all over the dataset."""
    blocks: dict[int, list[SampleItem]] = {}
    for item in samples.items:
        blocks.setdefault(item.id // BLOCK_SAMPLES, []).append(item)
    every = max(1, -(-len(samples.items) // most))
    items = [item for block in list(blocks.values())[::every] for item in block]
    return replace(samples, items=items[:most])


def _positions(size: int, most: int) -> Iterator[int]:
    """Yield all positions of a small dataset; else full blocks in a fixed random order, after the first block."""
    if size <= most:
        yield from range(size)
        return
    blocks, count = -(-size // BLOCK_SAMPLES), -(-most // BLOCK_SAMPLES)
    random = np.random.default_rng(size)
    chosen = random.permutation(blocks)[:count] if blocks < 10**7 else random.integers(0, blocks, count)
    for block in dict.fromkeys([0, *chosen.tolist()]):
        yield from range(block * BLOCK_SAMPLES, min(size, (block + 1) * BLOCK_SAMPLES))


def _parts(sample: object) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return inputs and target of a sample: the target is the last of a sequence, or the value with a target's key.

    A flat list of integers is a row of token ids, without a target.
    """
    if isinstance(sample, Mapping):
        key = next((name for name in TARGETS if name in sample), None)
        inputs = [_tensor(value) for name, value in sample.items() if name != key]
        target = _tensor(sample[key]) if key is not None else None
    elif isinstance(sample, tuple | list) and len(sample) > 1 and not _is_row_of_ids(sample):
        *first, last = sample
        inputs, target = [_tensor(value) for value in first], _tensor(last)
    else:
        inputs, target = [_tensor(sample)], None
    return tuple(x for x in inputs if x is not None), target


def _is_row_of_ids(sample: tuple[object, ...] | list[object]) -> bool:
    """Return True for a list of integers, or a tuple of more than two: a tuple of two may be an input and a label."""
    return all(isinstance(x, Integral) for x in sample) and (isinstance(sample, list) or len(sample) > 2)


def _tensor(value: object) -> Tensor | None:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        return None  # text, an image, something nested: only collate can convert it


def _digest(inputs: tuple[Tensor, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for x in inputs:
        digest.update(f"{x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return digest.hexdigest()
