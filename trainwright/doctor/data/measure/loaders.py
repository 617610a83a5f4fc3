"""Observes every DataLoader of the process: which samples, in which order, with which labels, for training or not."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from trainwright.recorder.datasets import draws, leaves_of
from trainwright.recorder.epochs import Epoch, EpochHistory, EpochSources, PendingBatch
from trainwright.recorder.labels import LabelCounts
from trainwright.recorder.probes import Probe, WatchedObjects, probe
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Kwargs, Loader
from trainwright.runlog.json_values import Facts


@probe
class Loaders(Probe):
    """``urgent``: samples that are trained on were used for evaluation, or an order came back, for the first time."""

    name = "loaders"

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots = watched.subject.roots
        self._sources, self._history, self._labels = EpochSources(), EpochHistory(), LabelCounts()
        self._running: weakref.WeakKeyDictionary[object, Epoch] = weakref.WeakKeyDictionary()
        self._epoch: Epoch | None = None  # the newest
        self._training: Epoch | None = None  # the newest that was trained on
        self._pending: list[PendingBatch] = []
        self._draws: Facts | None = None
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

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        epoch = self._running.get(iterator)
        if epoch is None:
            return
        evaluating = not torch.is_grad_enabled() or not any(root.training for root in self._roots)
        epoch.add_batch(ids, evaluating=evaluating)
        leaves = leaves_of(batch) if not evaluating and self._labels.wants(self._steps) else []
        del self._pending[:-63]  # an evaluation may be long
        self._pending.append(PendingBatch(epoch, leaves, ids, evaluating))

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        if not self._pending:
            return
        used = [each for each in self._pending if not each.evaluating] or self._pending[-1:]
        last = {
            id(each.epoch): each for each in used
        }  # of each loader the newest: before it another may have been read
        for each in last.values():
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
        return {f"evaluated {number}" for number in history.evaluated} | ({"again"} if again else set())

    def _test_workers(self) -> None:
        """Tests once whether the workers draw equal random numbers."""
        epoch = self._training
        if self._draws is not None or epoch is None or not epoch.loader.num_workers:
            return
        self._draws, loader = {}, epoch.loader
        if epoch.first:
            self._draws = draws(loader, epoch.first[0]) | {
                "workers": loader.num_workers,
                "persistent": loader.persistent_workers,
                "init": loader.worker_init_fn is not None,
            }

    def values(self) -> Facts:
        self._reported |= self._news()
        self.urgent = False
        if self._epoch is not None and self._epoch.batches:
            self._history.add(self._epoch, self._steps, whole=False)
        self._test_workers()
        self._labels.look_everywhere(self._training)
        return {
            "empty": self._sources.empty(),
            "repeats": self._history.repeats[-4:],
            "overlaps": self._history.overlaps(),
            "draws": self._draws or {},
            "labels": self._labels.facts(),
            "ascending": self._training is not None and self._training.ascending and bool(self._training.samples),
            "epochs": self._sources.num_epochs,
        }
