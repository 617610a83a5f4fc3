"""From a key to a batch: a pure function of (dataset, key), the same bits in any worker process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from trainwright.errors import DataError
from trainwright.state.cursor import Cursor
from trainwright.state.rng import RngBag, preserved_rng, seed_all


class Key(NamedTuple):
    """Names one micro-batch. ``closes`` is true for the last micro-batch of an optimizer step.

    ``cursor`` is where the stream stands once it has been trained on; ``ids`` are dataset positions (n,).
    """

    epoch: int
    start: int
    ids: NDArray[np.int64]
    closes: bool
    cursor: Cursor


class Fetched(NamedTuple):
    """A micro-batch on the host."""

    key: Key
    data: Any


class Failed(NamedTuple):
    """What a dataset raised, as text: exceptions of any type cross a process boundary this way."""

    ids: tuple[int, ...]
    what: str

    def error(self) -> DataError:
        """The same as an error with its remedy."""
        which = f"sample {self.ids[0]}" if len(self.ids) == 1 else f"one of the samples {list(self.ids)}"
        remedy = "open it with dataset[i] and repair or remove it"
        return DataError(f"the dataset raised {self.what} for {which}", sample_ids=self.ids, remedy=remedy)


def batch_seed(seed: int, epoch: int, start: int) -> int:
    """A seed that depends on what is fetched and on nothing else, least of all on the worker."""
    digest = hashlib.blake2b(f"{seed}:{epoch}:{start}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes a signed 64-bit seed


@contextmanager
def seeded(seed: int, epoch: int, start: int) -> Iterator[None]:
    """Inside, all generators stand where (seed, epoch, start) says; afterwards where they stood before."""
    with preserved_rng():
        seed_all(batch_seed(seed, epoch, start))
        yield


class Fetch(torch.utils.data.Dataset[Any]):
    """A map-style dataset whose index is a Key. Random numbers that items draw come from the key's own seed.

    Datasets that say ``deterministic = True`` (and TensorDataset) draw none and are not seeded.
    """

    def __init__(self, dataset: Any, *, seed: int, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate
        self.draws = not (isinstance(dataset, TensorDataset) or getattr(dataset, "deterministic", False))

    def __getitem__(self, key: Key) -> Fetched | Failed:
        if hasattr(self.dataset, "set_epoch"):  # for every batch: an evaluation may share the dataset
            self.dataset.set_epoch(key.epoch)
        if not self.draws:
            return self._batch(key)
        with seeded(self.seed, key.epoch, key.start):
            return self._batch(key)

    def _batch(self, key: Key) -> Fetched | Failed:
        dataset = self.dataset
        try:
            if hasattr(dataset, "fetch_batch"):
                return Fetched(key, dataset.fetch_batch(key.ids))
            if isinstance(dataset, TensorDataset):
                index = torch.from_numpy(key.ids)
                return Fetched(key, tuple(tensor[index] for tensor in dataset.tensors))
            if hasattr(dataset, "__getitems__"):
                return Fetched(key, self.collate(dataset.__getitems__(key.ids.tolist())))
        except Exception as error:
            alone = self._one_by_one(key)  # says which sample it was
            return alone if isinstance(alone, Failed) else Failed(tuple(key.ids.tolist()), _describe(error))
        return self._one_by_one(key)

    def _one_by_one(self, key: Key) -> Fetched | Failed:
        items = []
        for index in key.ids.tolist():
            try:
                items.append(self.dataset[index])
            except Exception as error:
                return Failed((index,), _describe(error))
        return _collated(key, items, self.collate)


def _collated(key: Key, samples: list[Any], collate: Callable[[list[Any]], Any]) -> Fetched | Failed:
    try:
        return Fetched(key, collate(samples))
    except Exception as error:
        return Failed(tuple(key.ids.tolist()), f"{_describe(error)} while collating")


class Reading(Protocol):
    """What a stream needs to know of how batches are made."""

    @property
    def batch_size(self) -> int: ...
    @property
    def micro_size(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def drop_last(self) -> bool: ...
    @property
    def epochs(self) -> int | None: ...
    @property
    def collate(self) -> Callable[[list[Any]], Any]: ...


class FetchStream(IterableDataset[Any]):
    """Micro-batches of an iterable dataset, epoch after epoch, until one gives no sample.

    ids are positions in the stream. Each epoch of it draws from generators of its own, seeded once. To start in
    mid-epoch it reads what comes before again, so that a shuffle buffer inside the dataset fills as it did.
    """

    def __init__(self, dataset: Any, *, start: Cursor, how: Reading) -> None:
        self.dataset, self.start, self.how = dataset, start, how

    def __iter__(self) -> Iterator[Fetched | Failed]:
        epochs = count(self.start.epoch) if self.how.epochs is None else range(self.start.epoch, self.how.epochs)
        for epoch in epochs:
            skip = self.start.position if epoch == self.start.epoch else 0
            any_sample = skip > 0
            for fetched in self._epoch(epoch, skip):
                any_sample = True
                yield fetched
            if not any_sample:
                return

    def _epoch(self, epoch: int, skip: int) -> Iterator[Fetched | Failed]:
        how, position, own = self.how, 0, _OwnGenerators(self.how.seed, epoch)
        with own.in_use():
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            items = iter(self.dataset)
        while True:
            size = how.batch_size if position >= skip else min(how.batch_size, skip - position)
            with own.in_use():
                samples, failed = _take(items, size, position)
            short = len(samples) < size
            if failed:
                yield failed
            elif position >= skip and not (short and how.drop_last):
                yield from self._micro_batches(epoch, position, samples)
            if short:
                return
            position += size

    def _micro_batches(self, epoch: int, position: int, samples: list[Any]) -> Iterator[Fetched | Failed]:
        for first in range(0, len(samples), self.how.micro_size):
            part = samples[first : first + self.how.micro_size]
            start, stop = position + first, position + first + len(part)
            closes = first + len(part) == len(samples)
            key = Key(epoch, start, np.arange(start, stop, dtype=np.int64), closes, Cursor(epoch, stop))
            with seeded(self.how.seed, epoch, start):
                fetched = _collated(key, part, self.how.collate)
            yield fetched


class _OwnGenerators:
    """The process's random generators as one epoch of a stream sees them: they run on where it last drew."""

    def __init__(self, seed: int, epoch: int) -> None:
        with seeded(seed, epoch, -1):
            self._state = RngBag.capture()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with preserved_rng():
            self._state.restore()
            yield
            self._state = RngBag.capture()


def _take(items: Iterator[Any], size: int, position: int) -> tuple[list[Any], Failed | None]:
    """Up to ``size`` samples; fewer at the end of the stream and where it raises."""
    samples: list[Any] = []
    try:
        for sample in islice(items, size):
            samples.append(sample)
    except Exception as error:
        return samples, Failed((position + len(samples),), _describe(error))
    return samples, None


def _describe(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
