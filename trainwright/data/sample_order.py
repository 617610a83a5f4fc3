"""The order in which positions of a dataset are visited: a function of (seed, epoch), or that of a user's sampler."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainwright.checkpoint.cursor import EpochStart, Ids
from trainwright.checkpoint.rng import RngBag, seed_of
from trainwright.data.generators import HeldGenerators, OwnGenerators, prepare_epoch, set_epoch

AT_ONCE, AT_ONCE_IMPURE = 1024, 16
"""Positions that are drawn from a sampler at once, since to change the random generators costs as much as 50 of them.

Fewer of a sampler that may look at how the training goes.
"""
BATCHES_AT_ONCE = 64
TRIED = 64
"""Positions, or batches of them, that are drawn twice to see whether an order can be drawn again."""
_PURE = (list, tuple, range, BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers whose order follows from the generators alone, so that an epoch can be drawn without those before it."""

_Sampler: TypeAlias = Iterable[int] | Iterable[Iterable[int]]


class OwnOrder:
    """The order of a sampler, or with ``in_batches`` of a batch sampler, each of whose batches is a micro-batch.

    Before each epoch it is told the epoch, and the global random generators and its own are seeded from (seed, epoch):
    the order of most samplers is then a pure function of these, and is drawn again without reading a sample. One that
    counts its epochs itself is asked for the epochs in turn.
    """

    def __init__(self, sampler: _Sampler, *, in_batches: bool = False) -> None:
        self.sampler, self.in_batches = sampler, in_batches
        self.repeats = True
        self._begun = 0  # epochs that were asked for, in turn

    @property
    def size(self) -> int | None:
        """Positions of an epoch, or batches of them; None where the sampler does not say."""
        with suppress(TypeError, NotImplementedError):
            return len(self.sampler)  # type: ignore[arg-type]
        return None

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch, where the batch sampler says so."""
        named = getattr(self.sampler, "batch_size", None)
        return named if self.in_batches and isinstance(named, int) and named > 0 else None

    @property
    def is_pure(self) -> bool:
        """Whether an epoch can be drawn without those before it."""
        parts = [self.sampler, getattr(self.sampler, "sampler", None)]
        return all(part is None or type(part) in _PURE or hasattr(part, "set_epoch") for part in parts)

    def batches(self, seed: int, epoch: int) -> Iterator[Ids]:
        """Yields the batches of an epoch; of a sampler without batches, pieces of the order."""
        while not self.is_pure and self._begun < epoch:
            for _ in self._drawn(seed, self._begun):
                pass
        yield from self._drawn(seed, epoch)

    def _drawn(self, seed: int, epoch: int) -> Iterator[Ids]:
        self._begun = epoch + 1
        generators = OwnGenerators(seed_of(f"{seed}:{epoch}:order"))
        with generators:
            prepare_epoch(self.sampler, seed, epoch)
            positions = iter(self.sampler)
        yield from self._rest(positions, generators)

    def _rest(self, positions: Iterator[object], generators: OwnGenerators) -> Iterator[Ids]:
        """Yields what is left of an epoch, drawn with these generators."""
        several, one = (BATCHES_AT_ONCE, 1) if self.in_batches else (AT_ONCE, AT_ONCE_IMPURE)
        at_once = several if self.is_pure else one
        while True:
            with generators:
                drawn = list(islice(positions, at_once))
            if not drawn:
                return
            yield from self._as_ids(drawn)

    def _as_ids(self, drawn: Sequence[object]) -> Iterator[Ids]:
        if self.in_batches:
            yield from (_ids(batch) for batch in drawn)  # type: ignore[arg-type]
        else:
            yield _ids(drawn)

    def try_twice(self) -> None:
        """Draws the beginning of an epoch twice; ``repeats`` says afterwards whether the same positions came.

        The sampler that is drawn from is a copy, and the generators that it holds are restored. Raises TypeError for a
        sampler whose items are no positions.
        """
        with HeldGenerators([self.sampler]).preserved():
            tried = [OwnOrder(_copied(self.sampler), in_batches=self.in_batches) for _ in range(2)]
            first, second = ([each.tolist() for each in islice(each._drawn(0, 0), TRIED)] for each in tried)
        self.repeats = first == second


class LoaderOrder(OwnOrder):
    """The order that a loop over a DataLoader gets, one pass of it an epoch.

    ``iter(loader)`` and the first item are drawn from the random generators of the process, which training draws from
    as well, and from those that loader and sampler hold. These draws decide the whole order for the samplers of torch,
    and for those that draw a permutation. What a sampler draws later comes from a copy of the generators: training goes
    on meanwhile, and a resume could not draw it again otherwise.
    """

    def __init__(self, loader: DataLoader[Any], sampler: _Sampler, *, in_batches: bool = False) -> None:
        super().__init__(sampler, in_batches=in_batches)
        self._loader = loader
        self._held = HeldGenerators([loader.generator, sampler])

    @property
    def has_generator(self) -> bool:
        """Whether the loader was given a generator."""
        return self._loader.generator is not None

    def begin(self, epoch: int) -> tuple[EpochStart, Iterator[Ids]]:
        """Begin an epoch; returns the random state before, from which ``again`` draws the same positions."""
        start = EpochStart(RngBag.capture(), self._held.read())
        first, positions = self._first(epoch)
        generators = OwnGenerators(0)
        generators.continue_here()
        return start, self._all(first, positions, generators)

    def again(self, epoch: int, start: EpochStart) -> Iterator[Ids]:
        """Draw an epoch of an earlier process again; the generators of this one stay as they are."""
        generators = OwnGenerators(0)
        generators.restore(start.rng)
        if not self.is_pure:
            for earlier in range(epoch):  # it may count its epochs itself
                for _ in self._drawn(0, earlier):
                    pass
        self._held.restore(start.held)
        with generators:
            first, positions = self._first(epoch)
        return self._all(first, positions, generators)

    def _first(self, epoch: int) -> tuple[list[object], Iterator[object]]:
        """What ``iter(loader)`` draws in torch, in its order, and the first item."""
        set_epoch(self.sampler, epoch)
        positions: Iterator[object] = iter(self.sampler)
        self.draw_seed(epoch)
        return list(islice(positions, 1)), positions

    def draw_seed(self, epoch: int) -> None:
        """Draw the seed of the workers, as ``iter(loader)`` does whether it has workers or not."""
        keeps_workers = self._loader.num_workers > 0 and self._loader.persistent_workers
        if not (keeps_workers and epoch):  # a loader that keeps its workers keeps their seed
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)

    def _all(self, first: list[object], positions: Iterator[object], generators: OwnGenerators) -> Iterator[Ids]:
        yield from self._as_ids(first) if first else ()
        yield from self._rest(positions, generators)


def _copied(sampler: _Sampler) -> _Sampler:
    """A copy with what it writes to: a trial must not count as an epoch, nor shuffle a list that the sampler holds.

    The dataset is not copied. An iterator, which cannot be, is returned itself.
    """
    try:
        twin = copy.copy(sampler)
        for name, value in (vars(twin) if hasattr(twin, "__dict__") else {}).items():
            if isinstance(value, Sampler):
                setattr(twin, name, _copied(value))
            elif isinstance(value, list | dict | set | np.ndarray) and name != "data_source":
                setattr(twin, name, copy.copy(value))
            elif isinstance(value, torch.Tensor):
                setattr(twin, name, value.clone())
    except Exception:  # the user's own __copy__
        return sampler
    return twin


def regrouped(pieces: Iterable[Ids], size: int) -> Iterator[Ids]:
    """Yields the same positions, ``size`` at a time; the last are what is left."""
    rest = np.zeros(0, dtype=np.int64)
    for piece in pieces:
        rest = np.concatenate([rest, piece]) if len(rest) else piece
        whole = len(rest) - len(rest) % size
        for start in range(0, whole, size):
            yield rest[start : start + size]
        rest = rest[whole:]
    if len(rest):
        yield rest


def _ids(positions: Iterable[object]) -> Ids:
    ids = np.asarray([*positions] if not isinstance(positions, np.ndarray | list) else positions)
    if not ids.size:
        return np.zeros(0, dtype=np.int64)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise TypeError("the items are no positions")
    return ids.astype(np.int64, copy=False)
