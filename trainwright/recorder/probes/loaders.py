"""Hears every DataLoader of the process: which samples, in which order, with which labels, for training or not."""

from __future__ import annotations

import math
import random
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from trainwright.recorder.datasets import base_of, draws, leaves_of, peek
from trainwright.recorder.probes import Probe, WatchedObjects, probe
from trainwright.recorder.program import Call, Operation, RecordedStep, constants_of

MARKS, SPREAD, LABELLED, PEEKED = 4096, 1 << 16, 64, 64
"""Batches of an epoch whose order is remembered, samples of a data set that are, batches whose labels are, and samples
that are read to know the labels of all."""
_AT_RANDOM = (RandomSampler, torch.utils.data.SubsetRandomSampler, torch.utils.data.WeightedRandomSampler)


@dataclass
class _Source:
    """A loader, and the data set under all its Subsets."""

    number: int
    loader: Any
    facts: dict[str, Any]
    base: int
    positions: Sequence[int] | None
    stride: int
    epochs: int = 0
    empty: int = 0


@dataclass
class _Epoch:
    """What one iterator gave. ``ids`` are positions in the base; of a large one only every ``stride``-th."""

    source: _Source
    loader: Any
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


@dataclass
class _Pending:
    """A batch that no backward pass has followed yet."""

    epoch: _Epoch
    leaves: list[Tensor]
    ids: Any
    evaluating: bool


class _Labels:
    """How often each value of one column of the batches came, batch by batch."""

    def __init__(self) -> None:
        self.column: int | None = None
        self.batches: list[Counter[float]] = []
        self.everywhere: Counter[float] | None = None


@probe
class Loaders(Probe):
    """``urgent``: samples that are trained on were used for evaluation, or an order came back, for the first time."""

    name = "loaders"

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots = watched.subject.roots
        self._sources: dict[int, _Source] = {}
        self._num_loaders = 0
        self._bases: list[Any] = []
        self._running: weakref.WeakKeyDictionary[Any, _Epoch] = weakref.WeakKeyDictionary()
        self._trained: dict[int, set[int]] = {}
        self._evaluated: dict[int, tuple[_Source, set[int]]] = {}
        self._last: dict[int, _Epoch] = {}
        self._epoch: _Epoch | None = None
        self._training: _Epoch | None = None
        self._pending: list[_Pending] = []
        self._repeats: list[dict[str, Any]] = []
        self._labels = _Labels()
        self._draws: dict[str, Any] | None = None
        self._steps = 0
        self._told: set[str] = set()
        for loader in watched.loaders:
            if isinstance(loader, DataLoader):
                self._source_of(loader)

    # what is heard

    def on_epoch(self, loader: Any, iterator: Any) -> None:
        self._end_epoch()
        source = self._source_of(loader)
        source.epochs += 1
        source.empty += 1
        self._epoch = self._running[iterator] = _Epoch(source, loader)
        self._pending.clear()

    def on_batch(self, iterator: Any, ids: Any, batch: Any, wait_s: float) -> None:
        epoch = self._running.get(iterator)
        if epoch is None:
            return
        evaluating = not torch.is_grad_enabled() or not any(root.training for root in self._roots)
        epoch.batches += 1
        epoch.evaluating += evaluating
        epoch.source.empty -= epoch.batches == 1
        self._note_ids(epoch, ids)
        wanted = not evaluating and (self._labels.column is None or len(self._labels.batches) < LABELLED)
        leaves = leaves_of(batch) if wanted and self._steps < 4 * LABELLED else []
        del self._pending[:-63]  # an evaluation may be long
        self._pending.append(_Pending(epoch, leaves, ids, evaluating))

    def _note_ids(self, epoch: _Epoch, ids: Any) -> None:
        if not isinstance(ids, list | tuple) or not ids or not all(type(each) is int for each in (ids[0], ids[-1])):
            return
        source = epoch.source
        chosen = ids if source.positions is None else [source.positions[i] for i in ids]
        if len(epoch.marks) < MARKS:
            epoch.marks.append(hash(tuple(chosen)))
        if not epoch.samples:
            epoch.first = tuple(ids[:64])
            epoch.ascending = len(ids) > 1 and all(b == a + 1 for a, b in pairwise(ids))
        epoch.samples += len(ids)
        epoch.ids.update(chosen if source.stride == 1 else [i for i in chosen if i % source.stride == 0])

    def on_backward(self, losses: tuple[Tensor, ...], how: dict[str, Any]) -> None:
        fed = [each for each in self._pending if not each.evaluating] or self._pending[-1:]
        last = {id(each.epoch): each for each in fed}  # of each loader the newest: before it another may have been read
        for each in last.values():
            each.epoch.trained += 1
            self._training = each.epoch

    def on_closed(self, segment: RecordedStep) -> None:
        self._steps += 1
        pending, self._pending = self._pending, []
        with_labels = [each for each in pending if each.leaves and not each.evaluating]
        if with_labels and self._labels.column is None and self._steps <= 4:
            self._find_labels(segment, with_labels[-1])
        if self._labels.column is not None and len(self._labels.batches) < LABELLED:
            for each in with_labels:
                if len(each.leaves) > self._labels.column:
                    values = each.leaves[self._labels.column].flatten()
                    self._labels.batches.append(Counter(values.tolist()))
        self.urgent = bool(self._news() - self._told)

    # what is made of it

    def _source_of(self, loader: Any) -> _Source:
        known = self._sources.get(id(loader))
        if known is not None and known.loader() is loader:
            return known
        base, positions = base_of(getattr(loader, "dataset", None))
        number = next((n for n, each in enumerate(self._bases) if each() is base), len(self._bases))
        if number == len(self._bases):
            self._bases.append(_reference(base))
        size = len(base) if hasattr(base, "__len__") else 0
        stride = max(1, size // SPREAD)
        source = _Source(self._num_loaders, _reference(loader), _facts(loader), number, positions, stride)
        self._num_loaders += 1
        self._sources[id(loader)] = source
        return source

    def _end_epoch(self) -> None:
        """What the epoch that is over adds to what is known."""
        epoch, self._epoch = self._epoch, None
        if epoch is None or not epoch.batches:
            return
        self._repeated(epoch)
        if epoch.role == "training":
            self._trained.setdefault(epoch.source.base, set()).update(epoch.ids)
            self._last[epoch.source.base] = epoch
        elif epoch.role == "evaluation":
            self._note_evaluation(epoch)

    def _note_evaluation(self, epoch: _Epoch) -> None:
        _, ids = self._evaluated.setdefault(epoch.source.number, (epoch.source, set()))
        ids.update(epoch.ids)
        if len(self._evaluated) > 8:  # a loader made anew for each evaluation
            del self._evaluated[min(self._evaluated)]

    def _repeated(self, epoch: _Epoch) -> None:
        """Whether an epoch began, or went on to its end, like the one before it on the same data."""
        before = self._last.get(epoch.source.base)
        if before is None or epoch.role != "training" or not epoch.marks:
            return
        length = min(len(epoch.marks), len(before.marks))
        equal = next((n for n in range(length) if epoch.marks[n] != before.marks[n]), length)
        told = {"batches": length, "equal": equal, "first": list(epoch.first), "epoch": epoch.source.epochs}
        told |= {"samples": epoch.samples, "ascending": epoch.ascending, **_order_of(epoch.loader)}
        told |= {"step": self._steps, "whole": epoch is not self._epoch}
        self._repeats = [*[each for each in self._repeats if each["whole"]][-7:], told]

    def _find_labels(self, segment: RecordedStep, batch: _Pending) -> None:
        """The column of a batch that the loss is given as target; sample ids and features are not."""
        targets = [t.flatten() for t in _targets(segment)]
        for column, leaf in enumerate(batch.leaves):
            flat = leaf.flatten()
            if leaf.ndim == 0 or len(flat) != len(leaf) or flat.tolist() == list(batch.ids or ()):
                continue
            if any(t.shape == flat.shape and torch.equal(t.cpu().double(), flat.cpu().double()) for t in targets):
                self._labels.column = column
                return

    def _look_everywhere(self) -> None:
        """Reads labels from all over the data set, once, where it is read in its order and batches hold few of them."""
        labels, epoch = self._labels, self._training
        if labels.everywhere is not None or epoch is None or not epoch.ascending or not labels.batches:
            return
        if sum(_entropy(each) for each in labels.batches) > 1.5 * len(labels.batches):
            return
        labels.everywhere = Counter()
        loader, column = epoch.loader, labels.column
        size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0
        asked = [37 * i % PEEKED * size // PEEKED for i in range(PEEKED)] if size > PEEKED else []
        for leaves in peek(loader.dataset, asked) if asked else []:
            if column is not None and len(leaves) > column and leaves[column].numel() == 1:
                labels.everywhere[leaves[column].item()] += 1

    def _test_workers(self) -> None:
        epoch = self._training
        if self._draws is not None or epoch is None or not epoch.loader.num_workers:
            return
        self._draws, loader = {}, epoch.loader
        if epoch.first:
            told = draws(loader, epoch.first[0])
            self._draws = told | {
                "workers": loader.num_workers,
                "persistent": loader.persistent_workers,
                "init": loader.worker_init_fn is not None,
            }

    def _overlaps(self) -> list[dict[str, Any]]:
        """Of each loader that was used for evaluation: how many of its samples were trained on."""
        told = []
        for number, (source, ids) in self._evaluated.items():
            seen = self._trained.get(source.base, set())
            shared = sorted(ids & seen)
            told.append(
                {"loader": number, "samples": len(ids) * source.stride, "shared": len(shared) * source.stride}
                | {"trained": len(seen) * source.stride, "same_loader": number in self._trained_by()}
                | {"ids": shared[:256]}
            )
        return told

    def _trained_by(self) -> set[int]:
        return {each.source.number for each in self._last.values()}

    def _news(self) -> set[str]:
        now = self._epoch
        is_new = "again" not in self._told
        if is_new and now is not None and now.batches == 1 and now.source.base in self._last:
            self._repeated(now)
        again = any(each["equal"] and not each["ascending"] for each in self._repeats)
        return {f"evaluated {number}" for number in self._evaluated} | ({"again"} if again else set())

    def values(self) -> dict[str, Any] | None:
        self._told |= self._news()
        self.urgent = False
        if self._epoch is not None and self._epoch.batches:
            self._repeated(self._epoch)
            if self._epoch.role == "evaluation":
                self._note_evaluation(self._epoch)
            elif self._epoch.role == "training":
                self._trained.setdefault(self._epoch.source.base, set()).update(self._epoch.ids)
        self._test_workers()
        self._look_everywhere()
        labels = self._labels
        return {
            "empty": [
                each.facts | {"epochs": each.epochs}
                for each in self._sources.values()
                if each.epochs and each.empty == each.epochs
            ],
            "repeats": self._repeats[-4:],
            "overlaps": self._overlaps(),
            "draws": self._draws or {},
            "labels": {
                "entropies": [_entropy(each) for each in labels.batches],
                "pooled": _entropy(sum(labels.batches, Counter())),
                "everywhere": _entropy(labels.everywhere) if labels.everywhere else None,
                "mixed": _mixed(labels),
            },
            "ascending": self._training is not None and self._training.ascending and bool(self._training.samples),
            "epochs": sum(each.epochs for each in self._sources.values()),
        }


def _targets(segment: RecordedStep) -> list[Tensor]:
    """Tensors that reach the loss, or a model beside its input, from outside."""
    found = []
    for each in segment.program:
        if isinstance(each, Operation | Call):
            found += [c.tensor for c in constants_of((each.args, each.kwargs)) if not c.tensor.requires_grad]
    return found


def _mixed(labels: _Labels) -> list[float]:
    """The lowest and the mean of what the mean entropy of as many batches is when their samples are drawn at random."""
    known = labels.everywhere or (sum(labels.batches, Counter()) if len(labels.batches) >= 4 else None)
    if not known:
        return []
    values, weights = list(known), list(known.values())
    generator, means = random.Random(0), []
    for _ in range(16):
        drawn = [Counter(generator.choices(values, weights, k=each.total())) for each in labels.batches[:16]]
        means.append(sum(map(_entropy, drawn)) / len(drawn))
    return [min(means), sum(means) / len(means)]


def _entropy(counts: Counter[float]) -> float:
    """In nats."""
    total = sum(counts.values())
    return max(0.0, -sum(n / total * math.log(n / total) for n in counts.values())) if total else 0.0


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:  # a list, a tuple: it cannot be followed, so it is kept
        return lambda: value


def _order_of(loader: Any) -> dict[str, Any]:
    """Who says the order: ``random`` if a sampler that is to draw another one each epoch does."""
    sampler = getattr(loader, "sampler", None)
    own = getattr(loader, "batch_sampler", None)
    if own is not None and type(own) is not torch.utils.data.BatchSampler:
        sampler = own
    distributed = isinstance(sampler, DistributedSampler) and bool(sampler.shuffle)
    return {
        "sampler": type(sampler).__name__,
        "random": isinstance(sampler, _AT_RANDOM) or distributed,
        "distributed": distributed,
        "sequential": isinstance(sampler, SequentialSampler),
    }


def _facts(loader: Any) -> dict[str, Any]:
    dataset = getattr(loader, "dataset", None)
    return {
        "samples": _length(dataset),
        "batch_size": getattr(loader, "batch_size", None),
        "drop_last": bool(getattr(loader, "drop_last", False)),
        "length": _length(loader),
    }


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None
