"""Observes every DataLoader of the process: samples, their order, labels, workers, and consumers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler

from trainwright.doctor.facts.data import DrawnSamples, LoaderRestarts, LoadersFacts, WorkerDraws
from trainwright.doctor.measure.datasets import draws, leaves_of, length_of
from trainwright.doctor.measure.epochs import Epoch, EpochHistory, EpochSources, PendingBatch, sampler_of
from trainwright.doctor.measure.labels import LabelCounts
from trainwright.recorder.callers import caller
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Kwargs, Loader

MIN_RESTARTS = 8  # Number of iterators of a loader with workers after which restarts are reported at once
CLOSE_UNTIL_STEP, CLOSE_BATCHES = 256, 2
"""Urgent findings are searched for after each of the first steps, later only in the first batches of an epoch."""
MIN_DRAWS_PER_SAMPLE = 32  # If drawn samples have this many draws on average, an undrawn sample is no coincidence


@dataclass
class _Reads:
    """Samples read from one loader. ``over``: the samples of the last two epochs of training."""

    samples: int
    source: str | None
    epoch: Epoch | None = None
    iterators: int = 0
    batches: int = 0
    draws: int = 0
    distinct: set[int] = field(default_factory=set)
    over: list[set[int]] = field(default_factory=list)

    def begin(self, epoch: Epoch) -> None:
        if self.epoch is not None and self.epoch.role == "training":
            self.draws, self.distinct = self.drawn()
            self.over = [*self.over[-1:], self.epoch.ids]
        self.epoch, self.iterators = epoch, self.iterators + 1

    def drawn(self) -> tuple[int, set[int]]:
        """Returns the number of draws for training, and the set of samples that were drawn."""
        epoch = self.epoch
        if epoch is None or epoch.role != "training" or epoch.source.stride > 1:
            return self.draws, self.distinct
        return self.draws + epoch.samples, self.distinct | epoch.ids


class Loaders(Probe):
    """Observes the loaders and their samples. ``urgent``: ``_news`` has a name that was not reported."""

    name = LoadersFacts.experiment
    observes_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots = watched.subject.roots
        self._sources, self._history, self._labels = EpochSources(), EpochHistory(), LabelCounts()
        self._running: weakref.WeakKeyDictionary[object, Epoch] = weakref.WeakKeyDictionary()
        self._epoch: Epoch | None = None  # the newest
        self._training: Epoch | None = None  # the newest epoch that was trained on
        self._pending: list[PendingBatch] = []
        self._reads: weakref.WeakKeyDictionary[Loader, _Reads] = weakref.WeakKeyDictionary()
        self._workers: WorkerDraws | None = None
        self._are_tested = False
        self._steps = 0
        self._reported: set[str] = set()
        for loader in watched.loaders:
            if isinstance(loader, DataLoader):
                self._sources.of(loader)

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        over, self._epoch = self._epoch, None
        if over is not None and over.batches:
            self._history.add(over, whole=True)
        source = self._sources.of(loader)
        source.epochs += 1
        source.empty += 1
        self._epoch = self._running[iterator] = Epoch(source, loader)
        self._pending.clear()
        size = length_of(getattr(loader, "dataset", None)) or 0
        reads = self._reads.setdefault(loader, _Reads(size, caller()))
        reads.begin(self._epoch)

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        epoch = self._running.get(iterator)
        if epoch is None:
            return
        evaluating = not torch.is_grad_enabled() or not any(root.training for root in self._roots)
        epoch.add_batch(ids, evaluating=evaluating)
        self._reads[epoch.loader].batches += 1
        leaves = leaves_of(batch) if not evaluating and self._labels.wants(self._steps) else []
        del self._pending[:-63]  # an evaluation may be long
        self._pending.append(PendingBatch(epoch, leaves, ids, evaluating))

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        used = [each for each in self._pending if not each.evaluating] or self._pending[-1:]
        # the newest epoch of each loader, because several may be read in turn
        newest = {id(each.epoch): each for each in used}
        for each in newest.values():
            each.epoch.trained += 1
            self._training = each.epoch

    def on_closed(self, step: RecordedStep) -> None:
        self._steps += 1
        if step.inputs is not None:
            self.on_backward((), {})  # this step's backward pass was not reported
        if self._epoch is not None:
            pending, self._pending = self._pending, []
            if self._steps <= CLOSE_UNTIL_STEP or self._epoch.batches <= CLOSE_BATCHES:
                self._labels.add(step, pending, self._steps)
                self.urgent = bool(self._news() - self._reported)

    def _news(self) -> set[str]:
        """Returns the names of findings that are urgent when they become true."""
        now, history = self._epoch, self._history
        if "again" not in self._reported and now is not None and now.batches == 1 and history.follows_another(now):
            history.compare(now, whole=False)
        signs = {
            "again": any(each.equal and not each.ascending for each in history.repeats),
            "few": any(
                each.draws >= MIN_DRAWS_PER_SAMPLE * max(8, len(each.distinct)) for each in self._reads.values()
            ),
            "restarts": any(
                each.iterators >= MIN_RESTARTS and each.batches < 2 * each.iterators for each in self._restarts()
            ),
        }
        return {f"evaluated {number}" for number in history.evaluated} | {name for name, seen in signs.items() if seen}

    def _test_workers(self) -> None:
        """Tests once whether the workers draw equal random numbers."""
        epoch = self._training
        if self._are_tested or epoch is None or not epoch.loader.num_workers or not epoch.first:
            return
        self._are_tested, loader = True, epoch.loader
        self._workers = draws(loader, epoch.first[0])

    def facts(self) -> LoadersFacts:
        self._reported |= self._news()
        self.urgent = False
        if self._epoch is not None and self._epoch.batches:
            self._history.add(self._epoch, whole=False)
        self._test_workers()
        self._labels.sample_dataset(self._training)
        trained = self._training
        reads = None if trained is None else self._reads.get(trained.loader)
        return LoadersFacts(
            source=None if reads is None else reads.source,
            empty=tuple(self._sources.empty()),
            repeats=tuple(self._history.repeats[-4:]),
            overlaps=tuple(self._history.overlaps()),
            drawn=tuple(_drawn(loader, each) for loader, each in self._reads.items() if each.drawn()[0]),
            restarts=tuple(self._restarts()),
            workers=self._workers,
            entropies=self._labels.entropies,
            mixed=self._labels.mixed(),
            ascending=trained is not None and trained.ascending and bool(trained.samples),
        )

    def _restarts(self) -> Iterator[LoaderRestarts]:
        for loader, each in self._reads.items():
            if (workers := loader.num_workers) and each.iterators > 1:
                yield LoaderRestarts(workers, each.iterators, each.batches, length_of(loader))


def _drawn(loader: Loader, reads: _Reads) -> DrawnSamples:
    sampler, (number, distinct), over = sampler_of(loader), reads.drawn(), reads.over
    tail = (getattr(loader, "batch_size", None) or 1) if getattr(loader, "drop_last", False) else 0
    chooses = isinstance(sampler, SubsetRandomSampler | DistributedSampler)
    chooses |= isinstance(sampler, RandomSampler) and (sampler.replacement or sampler._num_samples is not None)
    return DrawnSamples(
        samples=reads.samples,
        draws=number,
        distinct=len(distinct),
        same_set=len(over) == 2 and over[0] == over[1] and reads.samples - len(over[1]) > tail,
        chooses=chooses,
        sampler=type(sampler).__name__,
    )
