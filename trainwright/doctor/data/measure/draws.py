"""Counts which samples loaders draw in an epoch, by the numbers that their samplers give, and what becomes of them."""

from __future__ import annotations

import weakref
from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainwright.doctor.data.facts import DrawsFacts, LoaderEpochs
from trainwright.recorder.comparisons import Site
from trainwright.recorder.datasets import length_of
from trainwright.recorder.plain_tensors import rows_of
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, Loader
from trainwright.runlog.json_values import Facts, strict

MOST_SAMPLES = 1 << 17
"""Of a larger data set nothing is counted."""
LISTED = 16
LEAST, USED = 3, 0.75
"""Batches of a pass that is judged, and what share of them a model must be called for: some may be left out."""


@dataclass
class _Epoch:
    """What one iterator drew. ``trained``: batches that came in a mode with gradients while a model trains."""

    drawn: int = 0
    batches: int = 0
    trained: int = 0
    ids: set[int] = field(default_factory=set)


@dataclass
class _Passes:
    """Passes over loaders without gradients. ``batches``, their ``rows``, ``calls`` and the rows that these ``read``
    are of the one that runs.
    """

    batches: int = 0
    rows: int = 0
    calls: int = 0
    read: int = 0
    over: int = 0
    with_fewer: int = 0
    sites: set[Site] = field(default_factory=set)
    last: tuple[int, int] = (0, 0)

    def end(self, known: Container[Site]) -> None:
        """The pass is over. It is counted where one of its calls is at a ``known`` site of evaluations."""
        if self.batches >= LEAST and any(each in known for each in self.sites):
            self.over += 1
            if self.calls < USED * self.batches and not self.read >= USED * self.rows > 0:
                self.with_fewer += 1
                self.last = self.batches, self.calls
        self.batches = self.rows = self.calls = self.read = 0
        self.sites.clear()


@dataclass
class _Source:
    """A loader that is alive, its last two epochs that are over, and the one that runs."""

    samples: int
    over: list[_Epoch] = field(default_factory=list)
    running: _Epoch = field(default_factory=_Epoch)

    @property
    def is_trained_on(self) -> bool:
        """Whether both of the last epochs were. An evaluation may read a part of its data."""
        return len(self.over) == 2 and all(2 * each.trained > each.batches for each in self.over)


class Draws(Probe):
    """A set of integers for each epoch."""

    name = DrawsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._sites = watched.sites
        self._given = {id(each) for each in watched.loaders if isinstance(each, DataLoader)}
        self._read: set[int] = set()
        self._of: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._others = 0
        self._passes = _Passes()
        self._trained: set[int] = set()
        self._evaluated: set[int] = set()
        self._sources: weakref.WeakKeyDictionary[Loader, _Source] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[object, _Source] = weakref.WeakKeyDictionary()

    def on_forward_without_grad(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if self._passes.batches:
            self._passes.calls += 1
            self._passes.sites.add(self._sites.current)
            self._passes.read += max(map(rows_of, tensors_of((args, kwargs), 3)), default=1)

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._passes.end(self._sites)
        self._read.add(id(loader))
        self._of[iterator] = id(loader)
        size = length_of(getattr(loader, "dataset", None)) or 0
        if not 0 < size <= MOST_SAMPLES:
            return
        source = self._sources.setdefault(loader, _Source(size))
        if source.running.drawn:
            source.over = [*source.over[-1:], source.running]
            source.running = _Epoch()
        self._iterators[iterator] = source

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        if not torch.is_grad_enabled():
            self._passes.batches += 1
            self._passes.rows += max(map(rows_of, tensors_of(batch, 2)), default=0)
        if (loader := self._of.get(iterator)) is not None and loader not in self._given:
            self._others += torch.is_grad_enabled()
            (self._trained if torch.is_grad_enabled() else self._evaluated).add(loader)
        source = self._iterators.get(iterator)
        if source is not None and isinstance(ids, list) and ids and type(ids[0]) is int:
            source.running.drawn += len(ids)
            source.running.batches += 1
            source.running.trained += torch.is_grad_enabled()
            source.running.ids.update(ids)

    def values(self) -> Facts | None:
        self._passes.end(self._sites)
        rows = [_facts(loader, each) for loader, each in self._sources.items() if each.is_trained_on]
        if not rows and not self._given and not self._passes.over:
            return None
        facts = DrawsFacts(
            epochs=tuple(rows),
            given=len(self._given),
            given_read=len(self._given & self._read),
            others_trained=self._others,
            others_evaluated=bool(self._trained & self._evaluated),
            passes=self._passes.over,
            passes_with_fewer=self._passes.with_fewer,
            batches=self._passes.last[0],
            calls=self._passes.last[1],
        )
        return dict(strict(vars(facts)))


def _facts(loader: Loader, source: _Source) -> LoaderEpochs:
    before, last = source.over
    never = sorted(set(range(source.samples)) - before.ids - last.ids)
    batch, drops = getattr(loader, "batch_size", None) or 1, bool(getattr(loader, "drop_last", False))
    sampler = _sampler(loader)
    return LoaderEpochs(
        samples=source.samples,
        drawn=last.drawn,
        distinct=len(last.ids),
        never=len(never),
        first_never=tuple(never[:LISTED]),
        same_set=before.ids == last.ids,
        tail=batch - 1 if drops else 0,
        chosen=_chooses(sampler),
        sampler=type(sampler).__name__,
    )


def _sampler(loader: Loader) -> object:
    own: object = getattr(loader, "batch_sampler", None)
    return own if own is not None and type(own) is not BatchSampler else getattr(loader, "sampler", None)


def _chooses(sampler: object) -> bool:
    """Whether it is made to leave out samples, or to draw some again."""
    is_part = isinstance(sampler, SubsetRandomSampler | WeightedRandomSampler | DistributedSampler)
    return is_part or (isinstance(sampler, RandomSampler) and (sampler.replacement or sampler._num_samples is not None))
