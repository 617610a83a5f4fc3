"""Records the epochs of all data loaders: their samples, order, and use in training or evaluation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainwright.doctor.facts.data import EmptyLoader, EpochRepeat, LoaderOverlap
from trainwright.doctor.measure.datasets import base_of, length_of
from trainwright.recorder.user_types import Loader

MARKS = 4096
"""Maximum number of batches per epoch whose order is recorded."""
SPREAD = 1 << 16
"""Every ``size // SPREAD``-th sample of a dataset is recorded: fewer than 131,072, and all of a smaller dataset."""
_AT_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass
class EpochSource:
    """A loader, and the dataset under all its Subsets.

    ``base`` is the number of the dataset, ``positions`` are the positions in it that the Subsets keep (None:
    all). ``epochs`` counts the epochs that began, ``empty`` those among them that returned no batch. ``facts`` are the
    properties of the loader.
    """

    number: int
    loader: Callable[[], object]
    facts: EmptyLoader
    base: int
    positions: Sequence[int] | None
    stride: int
    epochs: int = 0
    empty: int = 0


@dataclass
class Epoch:
    """The batches of one iterator. ``ids`` are positions in the base; of a large base only multiples of ``stride``.

    ``trained`` counts the batches that were followed by a backward pass, ``evaluating`` those that came in eval mode or
    without gradients. ``marks`` are hashes of the ids of each batch, ``first`` the ids of the first one.
    """

    source: EpochSource
    loader: Loader
    batches: int = 0
    trained: int = 0
    evaluating: int = 0
    samples: int = 0
    marks: list[int] = field(default_factory=list)
    ids: set[int] = field(default_factory=set)
    first: tuple[int, ...] = ()
    ascending: bool = True

    @property
    def role(self) -> str:
        if 2 * self.trained >= max(1, self.batches):
            return "training"
        return "evaluation" if 2 * self.evaluating > self.batches else "unknown"

    def add_batch(self, ids: object, *, evaluating: bool) -> None:
        """Counts a batch. ``ids`` are the sampler's value for it: a list of positions, or anything else."""
        self.batches += 1
        self.evaluating += evaluating
        self.source.empty -= self.batches == 1
        if isinstance(ids, list | tuple) and ids and all(type(each) is int for each in (ids[0], ids[-1])):
            self._add_ids(ids)

    def _add_ids(self, ids: Sequence[int]) -> None:
        source = self.source
        chosen = ids if source.positions is None else [source.positions[i] for i in ids]
        if len(self.marks) < MARKS:
            self.marks.append(hash(tuple(chosen)))
        if not self.samples:
            self.first = tuple(ids[:64])
            self.ascending = len(ids) > 1 and all(b == a + 1 for a, b in pairwise(ids))
        self.samples += len(ids)
        self.ids.update(chosen if source.stride == 1 else [i for i in chosen if i % source.stride == 0])


@dataclass
class PendingBatch:
    """A batch without a backward pass so far. ``leaves`` are its tensors, if its labels are needed."""

    epoch: Epoch
    leaves: list[Tensor]
    ids: object
    evaluating: bool


class EpochSources:
    """All loaders of the process, each with its dataset."""

    def __init__(self) -> None:
        self._by_id: dict[int, EpochSource] = {}
        self._bases: list[Callable[[], object]] = []
        self._num_loaders = 0

    def of(self, loader: Loader) -> EpochSource:
        """Returns the source of a loader; a new one for a new loader."""
        known = self._by_id.get(id(loader))
        if known is not None and known.loader() is loader:
            return known
        base, positions = base_of(getattr(loader, "dataset", None))
        number = next((n for n, each in enumerate(self._bases) if each() is base), len(self._bases))
        if number == len(self._bases):
            self._bases.append(_reference(base))
        size = length_of(base) or 0
        stride = max(1, size // SPREAD)
        source = EpochSource(self._num_loaders, _reference(loader), _facts(loader), number, positions, stride)
        self._num_loaders += 1
        self._by_id[id(loader)] = source
        return source

    def empty(self) -> list[EmptyLoader]:
        """Returns the loaders that never returned a batch."""
        empty = (each for each in self._by_id.values() if each.epochs and each.empty == each.epochs)
        return [replace(each.facts, epochs=each.epochs) for each in empty]


class EpochHistory:
    """Samples used in training and in evaluation, and epochs that repeated an order."""

    def __init__(self) -> None:
        self.evaluated: dict[int, tuple[EpochSource, set[int]]] = {}
        self.repeats: list[EpochRepeat] = []
        self._is_last_whole = True  # the last of ``repeats`` is a finished epoch
        self._trained: dict[int, set[int]] = {}
        self._last: dict[int, Epoch] = {}

    def add(self, epoch: Epoch, *, whole: bool) -> None:
        """Adds a finished epoch (``whole``), or the beginning of an unfinished one."""
        self.compare(epoch, whole=whole)
        if epoch.role == "training":
            self._trained.setdefault(epoch.source.base, set()).update(epoch.ids)
            if whole:
                self._last[epoch.source.base] = epoch
        elif epoch.role == "evaluation":
            _, ids = self.evaluated.setdefault(epoch.source.number, (epoch.source, set()))
            ids.update(epoch.ids)
            if len(self.evaluated) > 8:  # the loop makes a new loader for each evaluation
                del self.evaluated[min(self.evaluated)]

    def follows_another(self, epoch: Epoch) -> bool:
        """Returns True if an earlier epoch trained on the same data."""
        return epoch.source.base in self._last

    def compare(self, epoch: Epoch, *, whole: bool) -> None:
        """Records how many batches equal those of the previous epoch on the same data, in the same order."""
        before = self._last.get(epoch.source.base)
        if before is None or epoch.role != "training" or not epoch.marks:
            return
        length = min(len(epoch.marks), len(before.marks))
        equal = next((n for n in range(length) if epoch.marks[n] != before.marks[n]), length)
        if epoch.batches - epoch.trained >= equal > 0:
            return  # a resumed epoch: the batches before the resume were read again and skipped
        sampler = sampler_of(epoch.loader)
        repeat = EpochRepeat(
            batches=length,
            equal=equal,
            samples=epoch.samples,
            ascending=epoch.ascending,
            sampler=type(sampler).__name__,
            random=shuffles(epoch.loader),
            distributed=isinstance(sampler, DistributedSampler) and bool(sampler.shuffle),
        )
        finished = self.repeats if self._is_last_whole else self.repeats[:-1]
        self.repeats, self._is_last_whole = [*finished[-7:], repeat], whole

    def overlaps(self) -> list[LoaderOverlap]:
        """Returns, for each loader of an evaluation, how many of its samples were trained on."""
        found = []
        trained_by = {each.source.number for each in self._last.values()}
        for number, (source, ids) in self.evaluated.items():
            trained = self._trained.get(source.base, set())
            samples, shared, of_training = (len(each) * source.stride for each in (ids, ids & trained, trained))
            found.append(
                LoaderOverlap(samples=samples, shared=shared, trained=of_training, same_loader=number in trained_by)
            )
        return found


def _reference(value: object) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:  # a list or a tuple has no weak references, so it is kept alive
        return lambda: value


def sampler_of(loader: Loader) -> object:
    """Returns the sampler of the samples, or a custom sampler of batches."""
    batches: object = getattr(loader, "batch_sampler", None)
    return batches if batches is not None and type(batches) is not BatchSampler else getattr(loader, "sampler", None)


def shuffles(loader: Loader) -> bool:
    """Returns True if the sampler draws another order in each epoch."""
    sampler = sampler_of(loader)
    return isinstance(sampler, _AT_RANDOM) or (isinstance(sampler, DistributedSampler) and bool(sampler.shuffle))


def _facts(loader: Loader) -> EmptyLoader:
    return EmptyLoader(
        epochs=0,
        samples=length_of(getattr(loader, "dataset", None)),
        batch_size=getattr(loader, "batch_size", None),
        drop_last=bool(getattr(loader, "drop_last", False)),
        length=length_of(loader),
    )
