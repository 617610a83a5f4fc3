"""Computes the loss and the prediction of each sample.

Shapes: B samples of a batch, N classified rows (samples, tokens, pixels), C classes, K most probable classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from trainwright.checkpoint.batch_cut import cut_micro
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.engine.evaluate import evaluating
from trainwright.engine.loss import Batch, Loss, LossFn, as_loss_fn, call_loss, call_with_outputs, member
from trainwright.report.bad_cases import ConfidenceBin, ConfusedPair

IGNORE = -100
NUM_TOP_CLASSES = 32
"""Classes per sample whose probabilities are kept."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class SampleLosses(NamedTuple):
    """The summed loss and the weight of each sample, both (B,)."""

    total: Tensor
    weight: Tensor


class Classification(NamedTuple):
    """Logits (N, C) and labels (N,), some of which may be IGNORE. The ``shape`` of the labels begins with B."""

    logits: Tensor
    label: Tensor
    shape: tuple[int, ...]

    @property
    def losses(self) -> SampleLosses:
        each = F.cross_entropy(self.logits, self.label, reduction="none", ignore_index=IGNORE).double()
        rows = len(self.label) // self.shape[0]
        return SampleLosses(each.view(-1, rows).sum(1), (self.label != IGNORE).view(-1, rows).sum(1).double())


@dataclass
class Scores:
    """Losses and predictions of each sample, in the order of the data.

    If each sample has one class: ``label``, ``predicted``, the probabilities of both (``label_chance``, ``sure``), and
    the most probable classes ``top`` (count, K) with their ``chances``. If a number is predicted: ``values`` with
    (target, output). All others are None. ``tally`` counts all classified rows.
    """

    ids: Ints
    total: Floats
    weight: Floats
    label: Ints | None
    predicted: Ints | None
    label_chance: Floats | None
    sure: Floats | None
    top: Ints | None
    chances: Floats | None
    values: Floats | None
    tally: Tally | None
    unit: str
    notes: tuple[str, ...] = ()

    @property
    def loss(self) -> Floats:
        """Return the loss of each sample; NaN for a sample without weight."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.weight > 0, self.total / self.weight, np.nan)

    @property
    def mean(self) -> float:
        """Return the mean loss over all weights."""
        weight = self.weight.sum()
        return float(self.total[self.weight > 0].sum() / weight) if weight else math.nan


def score(model: nn.Module, loss: Callable[..., Loss | Tensor], batches: Iterable[MicroBatch]) -> Scores:
    """Go over the data once in evaluation mode. The model is unchanged.

    The loss of a sample is computed from the outputs if that gives the same mean as the loss function. Otherwise the
    loss function is called with one sample at a time.
    """
    found = CollectedScores()
    found.collect(model, loss, batches)
    return found.scores()


class _Forward(NamedTuple):
    losses: SampleLosses
    classified: Classification | None
    values: Tensor | None
    note: str = ""


class _LastCall:
    """Keeps the last output of a model, for losses that do not return the outputs that they use."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.output: object = None

    def __enter__(self) -> _LastCall:
        self._handle = self._model.register_forward_hook(self._keep)
        return self

    def _keep(self, _module: nn.Module, _args: object, output: object) -> None:
        self.output = output

    def __exit__(self, *error: object) -> None:
        self._handle.remove()


def _forward(loss_fn: LossFn, model: nn.Module, micro: MicroBatch, last: _LastCall, where: str) -> _Forward:
    kept: list[object] = []

    def keeping(model: nn.Module, batch: Batch) -> Loss | Tensor:
        found = call_with_outputs(loss_fn, model, batch)
        kept[:] = [found.outputs, found.targets]
        return found.loss

    mean = _mean(call_loss(keeping, model, micro, where))
    outputs, targets = kept
    outputs = member(last.output, "logits", 0) if outputs is None else member(outputs, "logits", 0)
    targets = _target(micro.data) if targets is None else targets
    pair = None
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.dim() and targets.dim():
        pair = (outputs, targets)
    ways = [*_classifications(*pair)] if pair else []
    fitting = next((each for each in ways if _same(each.losses, mean)), None)
    classified = fitting or (ways[0] if ways and pair and _is_certain(*pair) else None)
    if fitting is not None:
        return _Forward(fitting.losses, fitting, None)
    numbers = _numbers(*pair) if pair and classified is None else None
    by_element = next((each for each in _by_element(*pair) if _same(each, mean)), None) if pair else None
    if by_element is not None:
        return _Forward(by_element, classified, numbers)
    losses = _one_by_one(loss_fn, model, micro, where)
    note = ""
    if not _same(losses, mean):
        alone = float(losses.total.sum() / losses.weight.sum())
        note = f"the loss of a batch is not that of its samples one at a time: {mean:.4g} and {alone:.4g}"
    return _Forward(losses, classified, numbers, note)


def _mean(loss: Loss | Tensor) -> float:
    if isinstance(loss, Loss):
        weight = float(loss.weight)
        return float(loss.total) / weight if weight else math.nan
    return float(loss)


def _same(losses: SampleLosses, mean: float) -> bool:
    """Return True if the mean of the losses equals ``mean`` up to float32 rounding."""
    weight = float(losses.weight.sum())
    if not weight or math.isnan(mean):
        return math.isnan(mean) and (not weight or bool(losses.total.isnan().any()))
    rounding = torch.finfo(torch.float32).eps * max(8, len(losses.total), weight)
    return math.isclose(float(losses.total.sum()) / weight, mean, rel_tol=min(rounding, 1e-3), abs_tol=1e-7)


def _one_by_one(loss_fn: LossFn, model: nn.Module, micro: MicroBatch, where: str) -> SampleLosses:
    totals, weights = [], []
    for piece in cut_micro(micro, 1):
        loss = call_loss(loss_fn, model, piece, where)
        totals.append(float(loss.total if isinstance(loss, Loss) else loss))
        weights.append(float(loss.weight) if isinstance(loss, Loss) else 1.0)
    return SampleLosses(
        torch.tensor(totals, dtype=torch.float64, device="cpu"),
        torch.tensor(weights, dtype=torch.float64, device="cpu"),
    )


def _target(batch: Batch) -> object:
    if isinstance(batch, Mapping):
        return batch.get("labels")
    return batch[-1] if isinstance(batch, tuple | list) and len(batch) > 1 else None


def _classifications(outputs: Tensor, targets: Tensor) -> Iterator[Classification]:
    """Yield every reading of outputs and targets as a classification: as logits first, then as probabilities."""
    if not outputs.is_floating_point() or not targets.dim() or not outputs.dim():
        return
    outputs = outputs.float()
    if not targets.is_floating_point() and outputs.dim() == targets.dim() + 1:
        labels = targets.long()
        for logits in (outputs, outputs.movedim(1, -1)):
            classes = logits.shape[-1]
            in_range = bool((((labels >= 0) & (labels < classes)) | (labels == IGNORE)).all())
            if logits.shape[:-1] == labels.shape and classes > 1 and in_range:
                flat = logits.reshape(-1, classes)
                yield Classification(flat, labels.reshape(-1), tuple(labels.shape))
                if _are_probabilities(flat):
                    yield Classification(flat.log().clamp(min=-100), labels.reshape(-1), tuple(labels.shape))
    alike = outputs.reshape(targets.shape) if outputs.numel() == targets.numel() else None
    one_each = targets.numel() == len(targets) and bool(((targets == 0) | (targets == 1)).all())
    if alike is not None and one_each:
        label, score = targets.reshape(-1).long(), alike.reshape(-1)
        yield Classification(torch.stack([torch.zeros_like(score), score], 1), label, (len(label),))
        if bool(((score >= 0) & (score <= 1)).all()):
            yield Classification(torch.stack([1 - score, score], 1).log().clamp(min=-100), label, (len(label),))


def _are_probabilities(rows: Tensor) -> bool:
    sums = rows.sum(1)
    return bool((rows >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


def _is_certain(outputs: Tensor, targets: Tensor) -> bool:
    """Return True if the shapes prove a classification: integer targets, and one more dimension in the outputs."""
    return not targets.is_floating_point() and outputs.dim() == targets.dim() + 1


def _by_element(outputs: Tensor, targets: Tensor) -> Iterator[SampleLosses]:
    """Yield losses that are a mean over all elements of an output with the shape of the target."""
    if outputs.shape != targets.shape or not outputs.dim() or not outputs.is_floating_point():
        return
    outputs, targets = outputs.double(), targets.double()
    yield _summed((outputs - targets) ** 2)
    yield _summed((outputs - targets).abs())
    if bool(((targets >= 0) & (targets <= 1)).all()):
        yield _summed(F.binary_cross_entropy_with_logits(outputs, targets, reduction="none"))


def _summed(each: Tensor) -> SampleLosses:
    rows = each.flatten(1) if each.dim() > 1 else each[:, None]
    return SampleLosses(rows.sum(1), torch.full((len(rows),), float(rows.shape[1]), dtype=torch.float64, device="cpu"))


def _numbers(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return the target and the output of each sample (B, 2) if both are single numbers."""
    if outputs.numel() != len(outputs) or targets.numel() != len(outputs) or not outputs.is_floating_point():
        return None
    return torch.stack([targets.reshape(-1).double(), outputs.reshape(-1).double()], 1)


@dataclass
class CollectedScores:
    """Collects results of batches on the host."""

    _columns: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    _tally: Tally | None = None
    _unit: str = "samples"
    _note: str = ""

    def collect(self, model: nn.Module, loss: Callable[..., Loss | Tensor], batches: Iterable[MicroBatch]) -> None:
        """Add the results of these batches, computed as in ``score``."""
        loss_fn = as_loss_fn(loss)
        with evaluating(model, loss), _LastCall(model) as last:
            for index, micro in enumerate(batches):
                self._add(_forward(loss_fn, model, micro, last, f"batch {index}"), micro)

    def _add(self, forward: _Forward, micro: MicroBatch) -> None:
        self._append("ids", np.asarray(micro.ids, dtype=np.int64))
        self._append("total", forward.losses.total.cpu().numpy())
        self._append("weight", forward.losses.weight.cpu().numpy())
        self._note = self._note or forward.note
        if forward.values is not None:
            self._append("values", forward.values.cpu().numpy())
        if forward.classified is not None:
            self._classified(forward.classified)

    def _append(self, name: str, values: NDArray[Any]) -> None:
        self._columns.setdefault(name, []).append(values)

    def _classified(self, seen: Classification) -> None:
        chances = seen.logits.double().softmax(1).nan_to_num(0.0)
        most = chances.max(1)
        self._tally = self._tally or Tally(chances.shape[1])
        counts = seen.label != IGNORE
        self._tally.add(*(each[counts].cpu().numpy() for each in (seen.label, most.indices, most.values)))
        if len(seen.shape) > 1:
            self._unit = "tokens" if len(seen.shape) == 2 else "pixels"
            return
        top = chances.topk(min(NUM_TOP_CLASSES, chances.shape[1]))
        label_chance = chances.gather(1, seen.label.clamp(min=0)[:, None])[:, 0]
        columns = {"label": seen.label, "predicted": most.indices, "label_chance": label_chance, "sure": most.values}
        for name, values in {**columns, "top": top.indices, "chances": top.values}.items():
            self._append(name, values.cpu().numpy())

    def scores(self, *, by_id: bool = False) -> Scores:
        """Return the scores of all samples, in the order of collection or by their ids."""
        joined = {name: np.concatenate(values) for name, values in self._columns.items()}
        count = len(joined["ids"])
        order = np.argsort(joined["ids"], kind="stable") if by_id else slice(None)

        def of_all(name: str) -> NDArray[Any] | None:
            return joined[name][order] if len(joined.get(name, ())) == count else None

        return Scores(
            joined["ids"][order],
            joined["total"][order],
            joined["weight"][order],
            label=of_all("label"),
            predicted=of_all("predicted"),
            label_chance=of_all("label_chance"),
            sure=of_all("sure"),
            top=of_all("top"),
            chances=of_all("chances"),
            values=of_all("values"),
            tally=self._tally,
            unit=self._unit,
            notes=(self._note,) if self._note else (),
        )


NUM_BINS = 15
"""Number of probability bins, as in Guo et al. 2017."""
MAX_CLASSES = 2048
"""With more classes, confusions are not counted: the matrix of 2,048 classes already takes 32 MiB."""
MAX_PAIRS_SHOWN = 20


class Tally:
    """Counts labels, predictions and their probabilities, batch by batch."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.confusion = np.zeros((classes, classes) if classes <= MAX_CLASSES else (0, 0), dtype=np.int64)
        self._count, self._sure, self._right = np.zeros(NUM_BINS), np.zeros(NUM_BINS), np.zeros(NUM_BINS)

    def add(self, label: NDArray[np.int64], predicted: NDArray[np.int64], sure: NDArray[np.float64]) -> None:
        """Add classified rows: their labels, their most probable classes, and the probabilities of these classes."""
        right = label == predicted
        which = np.clip(np.ceil(sure * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
        for sums, values in ((self._count, None), (self._sure, sure), (self._right, right.astype(np.float64))):
            sums += np.bincount(which, weights=values, minlength=NUM_BINS)
        if self.confusion.size:
            pairs = np.bincount(label * self.classes + predicted, minlength=self.classes**2)
            self.confusion += pairs.reshape(self.classes, self.classes)

    @property
    def count(self) -> int:
        return int(self._count.sum())

    @property
    def accuracy(self) -> float | None:
        return float(self._right.sum() / self.count) if self.count else None

    @property
    def bins(self) -> tuple[ConfidenceBin, ...]:
        """Divide the probabilities from 0 to 1 into fifteen equal bins, and return the bins that are not empty."""
        return tuple(
            ConfidenceBin(int(count), float(sure / count), float(right / count))
            for count, sure, right in zip(self._count, self._sure, self._right, strict=True)
            if count
        )

    @property
    def ece(self) -> float | None:
        """Return the expected calibration error: the mean distance between probability and accuracy over the bins.

        Naeini et al. 2015; Guo et al. 2017, arXiv 1706.04599, equation 3.
        """
        if not self.count:
            return None
        return float(np.abs(self._sure - self._right).sum() / self.count)

    def confused(self, names: Sequence[str]) -> Iterator[ConfusedPair]:
        """Yield the most frequent confusions."""
        wrong = self.confusion * ~np.eye(len(self.confusion), dtype=np.bool_)
        for place in np.argsort(-wrong, axis=None, kind="stable")[:MAX_PAIRS_SHOWN]:
            label, predicted = divmod(int(place), len(wrong))
            if wrong[label, predicted]:
                yield ConfusedPair(names[label], names[predicted], int(wrong[label, predicted]))

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """Return the confusion matrix; empty if it is too large to show."""
        if not 0 < len(self.confusion) <= MAX_PAIRS_SHOWN:
            return ()
        return tuple(tuple(row) for row in self.confusion.tolist())
