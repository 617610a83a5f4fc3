"""The order in which dataset positions are visited: a function of (seed, epoch), or given by a user's sampler."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
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
from trainwright.data.generators import HeldGenerators, UserGenerators, prepare_epoch, set_epoch

UINT64_MASK = 2**64 - 1


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Return the positions 0 .. size-1, each once, shuffled by a counter-based generator with the key (seed, epoch).

    The order is the same on every platform and in every version of NumPy, because it sorts raw words of Philox-4x64,
    the part of numpy.random that its policy (NEP 19) freezes. ``Generator.permutation`` takes a quarter of the time
    (0.03 s instead of 0.13 s for a million samples on one CPU core) but may change between releases, and a resumed run
    would get another order within an epoch. Ties among 64-bit words keep their order. No global generator is used.
    """
    if not shuffle:
        return np.arange(size, dtype=np.int64)
    key = np.array([seed & UINT64_MASK, epoch & UINT64_MASK], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


AT_ONCE, AT_ONCE_IMPURE = 1024, 16
"""Number of positions drawn from a sampler together, because exchanging the random generators takes as long as 50
draws.

Fewer for a sampler that may depend on the training so far.
"""
BATCHES_AT_ONCE = 64  # as AT_ONCE, for a batch sampler
POSITIONS_DRAWN_TWICE = 64
"""Number of positions, or batches of positions, that are drawn twice to test if an order is repeatable."""
_PURE = (list, tuple, range, BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers whose order follows from the generators alone, so that an epoch can be drawn without previous epochs."""

_Sampler: TypeAlias = Iterable[int] | Iterable[Iterable[int]]


class UserOrder:
    """The order of a sampler, or with ``in_batches`` of a batch sampler, each of whose batches is a micro-batch.

    Before each epoch, ``set_epoch`` is called, and the global random generators and those of the sampler are seeded
    from (seed, epoch). The order of most samplers is then a pure function of (seed, epoch), and can be drawn again
    without reading a sample. A sampler that counts its epochs itself is run through the epochs in turn.
    """

    def __init__(self, sampler: _Sampler, *, in_batches: bool = False) -> None:
        self.sampler, self.in_batches = sampler, in_batches
        self.repeats = True
        self._num_drawn = 0  # number of epochs drawn so far, in turn

    @property
    def size(self) -> int | None:
        """Number of positions, or batches of positions, in an epoch; None if the sampler has no length."""
        with suppress(TypeError, NotImplementedError):
            return len(self.sampler)  # type: ignore[arg-type]
        return None

    @property
    def batch_size(self) -> int | None:
        """Number of samples in a batch, if the batch sampler has a ``batch_size``."""
        named = getattr(self.sampler, "batch_size", None)
        return named if self.in_batches and isinstance(named, int) and named > 0 else None

    @property
    def is_pure(self) -> bool:
        """True if an epoch can be drawn without previous epochs."""
        parts = [self.sampler, getattr(self.sampler, "sampler", None)]
        return all(part is None or type(part) in _PURE or hasattr(part, "set_epoch") for part in parts)

    def batches(self, seed: int, epoch: int) -> Iterator[Ids]:
        """Yield the batches of an epoch, or pieces of the order of a sampler without batches."""
        while not self.is_pure and self._num_drawn < epoch:
            for _ in self._draw(seed, self._num_drawn):
                pass
        yield from self._draw(seed, epoch)

    def _draw(self, seed: int, epoch: int) -> Iterator[Ids]:
        self._num_drawn = epoch + 1
        generators = UserGenerators(seed_of(f"{seed}:{epoch}:order"))
        with generators:
            prepare_epoch(self.sampler, seed, epoch)
            positions = iter(self.sampler)
        yield from self._rest(positions, generators)

    def _rest(self, positions: Iterator[object], generators: UserGenerators) -> Iterator[Ids]:
        """Yield the rest of an epoch, drawn with these generators."""
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
        """Draw the start of an epoch twice and set ``repeats`` to True if both have the same positions.

        Uses a copy of the sampler, and restores the generators that it holds. Raises TypeError for a sampler whose
        items are not positions.
        """
        with HeldGenerators([self.sampler]).preserved():
            orders = [UserOrder(_copied(self.sampler), in_batches=self.in_batches) for _ in range(2)]
            first, second = (
                [each.tolist() for each in islice(each._draw(0, 0), POSITIONS_DRAWN_TWICE)] for each in orders
            )
        self.repeats = first == second


class LoaderOrder(UserOrder):
    """The order of a loop over a DataLoader, one pass per epoch.

    ``iter(loader)`` and the first item are drawn from the random generators of the process, which training also uses,
    and from the generators of loader and sampler. These draws determine the full order of torch's samplers, and of all
    that draw a permutation first. Later draws of a sampler use a copy of the generators. Otherwise a resume could not
    draw them again, because training continues meanwhile.
    """

    def __init__(self, loader: DataLoader[Any], sampler: _Sampler, *, in_batches: bool = False) -> None:
        super().__init__(sampler, in_batches=in_batches)
        self._loader = loader
        self._held = HeldGenerators([loader.generator, sampler])

    @property
    def has_generator(self) -> bool:
        return self._loader.generator is not None

    def begin(self, epoch: int) -> tuple[EpochStart, Iterator[Ids]]:
        """Start an epoch; return the random state before, from which ``again`` draws the same positions."""
        start = EpochStart(RngBag.capture(), self._held.read())
        first, positions = self._first(epoch)
        generators = UserGenerators(0)
        generators.continue_here()
        return start, self._all(first, positions, generators)

    def again(self, epoch: int, start: EpochStart) -> Iterator[Ids]:
        """Draw an epoch of an earlier process again, without changing the generators of this one."""
        generators = UserGenerators(0)
        generators.restore(start.rng)
        if not self.is_pure:
            for earlier in range(epoch):  # it may count its epochs itself
                for _ in self._draw(0, earlier):
                    pass
        self._held.restore(start.held)
        with generators:
            first, positions = self._first(epoch)
        return self._all(first, positions, generators)

    def _first(self, epoch: int) -> tuple[list[object], Iterator[object]]:
        """Make the draws of ``iter(loader)``, in its order, and draw the first item."""
        set_epoch(self.sampler, epoch)
        positions: Iterator[object] = iter(self.sampler)
        self.draw_seed(epoch)
        return list(islice(positions, 1)), positions

    def draw_seed(self, epoch: int) -> None:
        """Draw the seed of the workers, as ``iter(loader)`` does with or without workers."""
        keeps_workers = self._loader.num_workers > 0 and self._loader.persistent_workers
        if not (keeps_workers and epoch):  # persistent workers keep their seed
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)

    def _all(self, first: list[object], positions: Iterator[object], generators: UserGenerators) -> Iterator[Ids]:
        yield from self._as_ids(first) if first else ()
        yield from self._rest(positions, generators)


def _copied(sampler: _Sampler) -> _Sampler:
    """Copy a sampler and its mutable state, because a trial must not count as an epoch, nor shuffle a list of the
    sampler.

    The dataset is not copied. An iterator, which cannot be copied, is returned itself.
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
    """Yield the same positions, ``size`` at a time; the last group may be smaller."""
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
