"""The order in which positions of a dataset are visited: ours, a pure function of (seed, epoch), or a sampler's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TypeAlias

import numpy as np
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainwright.build.generators import OwnGenerators, prepare_epoch
from trainwright.state.cursor import Ids
from trainwright.state.rng import seed_of

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
        several, one = (BATCHES_AT_ONCE, 1) if self.in_batches else (AT_ONCE, AT_ONCE_IMPURE)
        at_once = several if self.is_pure else one
        while True:
            with generators:
                drawn = list(islice(positions, at_once))
            if not drawn:
                return
            if self.in_batches:
                yield from (_ids(batch) for batch in drawn)  # type: ignore[arg-type]
            else:
                yield _ids(drawn)

    def try_twice(self) -> None:
        """Draws the beginning of an epoch twice; ``repeats`` says afterwards whether the same positions came.

        Raises TypeError for a sampler whose items are no positions.
        """
        first, second = ([each.tolist() for each in islice(self._drawn(0, 0), TRIED)] for _ in range(2))
        self.repeats, self._begun = first == second, 0


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
