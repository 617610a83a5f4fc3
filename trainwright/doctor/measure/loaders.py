"""Observes every DataLoader of the process: samples, their order, labels, workers, and who reads them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SubsetRandomSampler

from trainwright.doctor.facts.data import (
    DrawnSamples,
    EmptyLoader,
    EpochRepeat,
    LoaderOverlap,
    LoaderRestarts,
    LoadersFacts,
    StaleAttribute,
    WorkerDraws,
)
from trainwright.recorder.datasets import draws, leaves_of, length_of
from trainwright.recorder.epochs import Epoch, EpochHistory, EpochSources, PendingBatch
from trainwright.recorder.labels import LabelCounts
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Kwargs, Loader
from trainwright.runlog.json_values import Facts, strict

MOST_SAMPLES = 1 << 17
"""Samples of a larger data set are not counted."""
OFTEN = 8
"""Iterators of a loader with workers after which restarts are reported at once."""
PLAIN = (bool, int, float, str)


@dataclass
class _Reads:
    """What was read from one loader: iterators and batches, draws, and the samples of the last two epochs."""

    samples: int
    iterators: int = 0
    batches: int = 0
    draws: int = 0
    distinct: set[int] = field(default_factory=set)
    epochs: list[set[int]] = field(default_factory=list)
    attributes: dict[str, object] | None = None  # when its persistent workers started


class Loaders(Probe):
    """``urgent``: samples that are trained on were evaluated, an order came back, or workers hold stale copies."""

    name = LoadersFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots = watched.subject.roots
        self._sources, self._history, self._labels = EpochSources(), EpochHistory(), LabelCounts()
        self._running: weakref.WeakKeyDictionary[object, Epoch] = weakref.WeakKeyDictionary()
        self._epoch: Epoch | None = None  # the newest
        self._training: Epoch | None = None  # the newest that was trained on
        self._pending: list[PendingBatch] = []
        self._reads: weakref.WeakKeyDictionary[Loader, _Reads] = weakref.WeakKeyDictionary()
        self._stale: StaleAttribute | None = None
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
            self._history.add(over, self._steps, whole=True)
        source = self._sources.of(loader)
        source.epochs += 1
        source.empty += 1
        self._epoch = self._running[iterator] = Epoch(source, loader)
        self._pending.clear()
        reads = self._reads.setdefault(loader, _Reads(length_of(getattr(loader, "dataset", None)) or 0))
        reads.iterators += 1
        reads.epochs = [*reads.epochs[-2:], set()]
        if loader.num_workers and loader.persistent_workers:
            self._compare_copies(loader, reads)

    def _compare_copies(self, loader: Loader, reads: _Reads) -> None:
        """Plain attributes of the data set and its transforms, now and when the persistent workers copied them."""
        now = _attributes(loader.dataset)
        if reads.attributes is None:
            reads.attributes = now
        for name, before in reads.attributes.items():
            if self._stale is None and name in now and now[name] != before:
                values = (str(before)[:40], str(now[name])[:40])
                self._stale = StaleAttribute(name=name, before=values[0], now=values[1], step=self._steps + 1)

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        epoch = self._running.get(iterator)
        if epoch is None:
            return
        evaluating = not torch.is_grad_enabled() or not any(root.training for root in self._roots)
        epoch.add_batch(ids, evaluating=evaluating)
        reads = self._reads[epoch.loader]
        reads.batches += 1
        if not evaluating and isinstance(ids, list) and ids and type(ids[0]) is int and reads.samples <= MOST_SAMPLES:
            reads.draws += len(ids)
            reads.distinct.update(ids)
            reads.epochs[-1].update(ids)
        leaves = leaves_of(batch) if not evaluating and self._labels.wants(self._steps) else []
        del self._pending[:-63]  # an evaluation may be long
        self._pending.append(PendingBatch(epoch, leaves, ids, evaluating))

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        if not self._pending:
            return
        used = [each for each in self._pending if not each.evaluating] or self._pending[-1:]
        newest = {id(each.epoch): each for each in used}  # of each loader: before it another may have been read
        for each in newest.values():
            each.epoch.trained += 1
            self._training = each.epoch

    def on_closed(self, step: RecordedStep) -> None:
        self._steps += 1
        if self._epoch is None:  # no loader was ever used
            return
        pending, self._pending = self._pending, []
        self._labels.add(step, pending, self._steps)
        self.urgent = bool(self._news() - self._reported)

    def _news(self) -> set[str]:
        """What is urgent the first time that it is true."""
        now, history = self._epoch, self._history
        if "again" not in self._reported and now is not None and now.batches == 1 and history.follows_another(now):
            history.compare(now, self._steps, whole=False)
        again = any(each["equal"] and not each["ascending"] for each in history.repeats)
        few = any(each.draws >= 512 and each.draws >= 32 * len(each.distinct) for each in self._reads.values())
        restarts = any(each.iterators >= OFTEN and each.batches < 2 * each.iterators for each in self._restarts())
        signs = {"again": again, "stale": self._stale is not None, "few": few, "restarts": restarts}
        return {f"evaluated {number}" for number in history.evaluated} | {name for name, seen in signs.items() if seen}

    def _test_workers(self) -> None:
        """Test once whether the workers draw equal random numbers."""
        epoch = self._training
        if self._are_tested or epoch is None or not epoch.loader.num_workers or not epoch.first:
            return
        self._are_tested, loader = True, epoch.loader
        found = draws(loader, epoch.first[0])
        if found.get("random") is not None:
            has_init = loader.worker_init_fn is not None
            self._workers = WorkerDraws(workers=loader.num_workers, init=has_init, **found)

    def values(self) -> Facts:
        self._reported |= self._news()
        self.urgent = False
        if self._epoch is not None and self._epoch.batches:
            self._history.add(self._epoch, self._steps, whole=False)
        self._test_workers()
        self._labels.look_everywhere(self._training)
        labels, trained = self._labels.facts(), self._training
        names = [each.name for each in fields(EpochRepeat)]
        empty = [{k: v for k, v in each.items() if k in EmptyLoader.__annotations__} for each in self._sources.empty()]
        overlaps = [
            {k: v for k, v in each.items() if k in LoaderOverlap.__annotations__} for each in self._history.overlaps()
        ]
        facts = LoadersFacts(
            empty=tuple(EmptyLoader(**each) for each in empty),
            repeats=tuple(EpochRepeat(**{name: each[name] for name in names}) for each in self._history.repeats[-4:]),
            overlaps=tuple(LoaderOverlap(**each) for each in overlaps),
            drawn=tuple(_drawn(loader, each) for loader, each in self._reads.items() if each.draws),
            restarts=tuple(self._restarts()),
            stale=self._stale,
            workers=self._workers,
            entropies=tuple(labels["entropies"]),
            mixed=tuple(labels["mixed"]),
            ascending=trained is not None and trained.ascending and bool(trained.samples),
        )
        return dict(strict(vars(facts)))

    def _restarts(self) -> Iterator[LoaderRestarts]:
        for loader, each in self._reads.items():
            if loader.num_workers and each.iterators > 1:
                yield LoaderRestarts(
                    workers=loader.num_workers,
                    iterators=each.iterators,
                    batches=each.batches,
                    length=length_of(loader),
                )


def _attributes(dataset: object) -> dict[str, object]:
    """Public attributes with plain values: of a data set, of the one that it wraps, and of its transforms."""
    found: dict[str, object] = {}
    waiting = [("dataset", dataset, 2)]
    while waiting:
        path, each, depth = waiting.pop()
        for name, value in getattr(each, "__dict__", {}).items():
            if name.startswith("_"):
                continue
            if isinstance(value, PLAIN):
                found[f"{path}.{name}"] = value
            elif depth and hasattr(value, "__dict__") and not isinstance(value, type | Tensor):
                waiting.append((f"{path}.{name}", value, depth - 1))
    return found


def _drawn(loader: Loader, reads: _Reads) -> DrawnSamples:
    sampler = _sampler(loader)
    tail = (getattr(loader, "batch_size", None) or 1) if getattr(loader, "drop_last", False) else 0
    over = reads.epochs[:-1][-2:]
    chooses = isinstance(sampler, SubsetRandomSampler | DistributedSampler)
    chooses |= isinstance(sampler, RandomSampler) and (sampler.replacement or sampler._num_samples is not None)
    return DrawnSamples(
        samples=reads.samples,
        draws=reads.draws,
        distinct=len(reads.distinct),
        same_set=len(over) == 2 and over[0] == over[1] and reads.samples - len(over[1]) > tail,
        chooses=chooses,
        sampler=type(sampler).__name__,
    )


def _sampler(loader: Loader) -> object:
    batches: object = getattr(loader, "batch_sampler", None)
    return batches if batches is not None and type(batches) is not BatchSampler else getattr(loader, "sampler", None)
