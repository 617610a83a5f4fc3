"""Metrics by name: ``tw.fit(metrics=["accuracy", "f1"])``.

Accuracy, top-k, errors and perplexity are sums divided by counts, and need no package. All others are metrics of
``torchmetrics`` with its defaults; averages over classes are macro averages unless ``args`` set another.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.distributed.group import SOLO, World
from trainwright.engine.chunked import IGNORE
from trainwright.engine.loss import Loss
from trainwright.engine.metric_task import (
    TASKS,
    Aligned,
    Task,
    aligned,
    classification_task,
    contradicts,
    regression_task,
)
from trainwright.engine.metrics import synchronized
from trainwright.engine.user_log import widest
from trainwright.errors import MissingExtra, UsageError, require_choice, text_of

LOGITS_BY_LOSS = {
    "BCEWithLogitsLoss": True,
    "binary_cross_entropy_with_logits": True,
    "MultiLabelSoftMarginLoss": True,
    "multilabel_soft_margin_loss": True,
    "BCELoss": False,
    "binary_cross_entropy": False,
}
"""Losses of torch for labels of 0 and 1: True if they take logits, False if they take probabilities."""


class Measure(Protocol):
    """Computes a metric from aligned batches."""

    def update(self, batch: Aligned, task: Task) -> None: ...
    def compute(self, world: World) -> float | dict[str, float]:
        """Return the value over the batches of all ranks, or one for each class. Every rank must call it."""
        ...


class Mean:
    """A sum over counted items divided by their number: exact over batches and over ranks."""

    def __init__(
        self, of: Callable[[Aligned, Task], tuple[Tensor, Tensor | int]], finish: Callable[[float], float] = float
    ) -> None:
        self._of, self._finish = of, finish
        self._total: Tensor | float = 0.0
        self._count: Tensor | float = 0.0

    def update(self, batch: Aligned, task: Task) -> None:
        self.add(*self._of(batch, task))

    def add(self, total: Tensor, count: Tensor | float) -> None:
        """Add to the sum and to the count."""
        self._total, self._count = self._total + widest(total), self._count + count

    def compute(self, world: World) -> float:
        parts = world.collect((float(self._total), float(self._count)))
        total, count = (sum(part) for part in zip(*parts, strict=True))
        return self._finish(total / count) if count else math.nan


class TorchmetricsMeasure:
    """A metric of ``torchmetrics``. ``classes_for_scores``: pass predicted classes instead of scores."""

    def __init__(self, metric: Any, *, classes_for_scores: bool = False) -> None:
        self._metric, self._classes_for_scores = metric, classes_for_scores

    def update(self, batch: Aligned, task: Task) -> None:
        scores, target = batch.scores, batch.target
        if task.kind == "regression":  # (N,) or (N, values)
            shape = (len(target), task.size) if task.size > 1 else (-1,)
            scores, target = scores.reshape(shape), target.reshape(shape)
        elif task.kind == "multiclass" and task.are_logits:
            scores = scores.softmax(-1)
        self._metric.update((scores > 0.5).long() if self._classes_for_scores else scores, target)

    def compute(self, world: World) -> float | dict[str, float]:
        with synchronized(self._metric, world), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a window of the log may lack a class, and a rank may lack samples
            try:
                value = self._metric.compute()
            except ValueError:  # too few samples
                return math.nan
        each = value.flatten().tolist()
        return each[0] if len(each) == 1 else {str(index): number for index, number in enumerate(each)}


class NamedMetric:
    """A metric that infers from the first batch what the outputs and targets mean.

    Args:
        name: Name in messages.
        make: Returns the measure for a task on a device. Raises UsageError for a task that it is not defined for.
        is_regression: True for metrics of numbers.
        task: Overrides the inferred task.
        ignore_index: Target that is not counted.
        from_logits: True if outputs are logits; None to infer it.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Task, torch.device], Measure],
        *,
        is_regression: bool = False,
        task: str | None = None,
        ignore_index: int | None = None,
        from_logits: bool | None = None,
    ) -> None:
        if task is not None:
            require_choice(f"the task of the metric {name!r}", task, TASKS)
        self._name = name
        self._make = make
        self._is_regression = is_regression
        self._stated = task
        self._ignored, self._from_logits = IGNORE if ignore_index is None else ignore_index, from_logits
        self._device = torch.device("cpu")
        self._task: Task | None = None
        self.reset()

    def reset(self) -> None:
        """Clear the state, but keep the inferred task."""
        self._measure: Measure | None = None
        self._contradicted: Tensor | None = None

    def to(self, device: torch.device) -> None:
        """Set the device of outputs and targets."""
        self._device = device

    def update(self, outputs: object, targets: object) -> None:
        """Add a batch. Raises UsageError if its meaning is ambiguous."""
        try:
            self._take(outputs, targets)
        except UsageError as error:
            raise self._named(error) from None

    def _take(self, outputs: object, targets: object) -> None:
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            kinds = f"a {type(outputs).__name__} and a {type(targets).__name__}"
            remedy = "let the loss return tw.Loss(total, weight, outputs=logits, targets=labels)"
            raise UsageError(f"it needs one tensor of outputs and one of targets; got {kinds}", remedy=remedy)
        if self._task is None:
            self._task = self._task_of(outputs, targets)
        if (found := contradicts(outputs, self._task)) is not None:
            self._contradicted = found if self._contradicted is None else self._contradicted | found
        self._begun(self._task).update(aligned(outputs, targets, self._task, self._ignored), self._task)

    def _task_of(self, outputs: Tensor, targets: Tensor) -> Task:
        if self._is_regression:
            return regression_task(outputs, targets)
        return classification_task(
            outputs, targets, stated=self._stated, ignored=self._ignored, are_logits=self._from_logits
        )

    def _begun(self, task: Task) -> Measure:
        if self._measure is None:
            self._measure = self._make(task, self._device)
        return self._measure

    def compute(self) -> float | dict[str, float]:
        """Return the value over the batches so far; NaN if there were none."""
        return self.over_ranks(SOLO)

    def over_ranks(self, world: World) -> float | dict[str, float]:
        """Return the value over the batches of all ranks, the same on each. Every rank must call it."""
        tasks = list(dict.fromkeys(task for task in world.collect(self._task) if task is not None))
        if not tasks:
            return math.nan
        try:
            if len(tasks) > 1:
                what = " and ".join(f"{task.kind} of {task.size}" for task in tasks)
                raise UsageError(
                    f"the first batches of the ranks imply different tasks: {what}",
                    remedy="state task and from_logits in args",
                )
            if self._contradicted is not None and bool(self._contradicted):
                raise UsageError(
                    "the outputs of the first batch were between 0 and 1, as probabilities do, and later ones do not",
                    remedy="state what they are: args: {from_logits: true}",
                )
            self._task = tasks[0]
            return self._begun(tasks[0]).compute(world)
        except UsageError as error:
            raise self._named(error) from None

    def _named(self, error: UsageError) -> UsageError:
        return UsageError(f"the metric {self._name!r}: {error.message}", remedy=error.remedy)


class LossPerplexity:
    """Perplexity for a built-in cross-entropy loss: exp of its mean, without logits."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Clear the state."""
        self._mean = Mean(_no_batch, math.exp)

    def take_loss(self, loss: Loss) -> None:
        """Add the loss of a batch."""
        self._mean.add(loss.total.detach(), loss.weight)

    def update(self, outputs: object, targets: object) -> None:
        """Needs no outputs."""

    def compute(self) -> float:
        """Return the value over the batches so far; NaN if there were none."""
        return self.over_ranks(SOLO)

    def over_ranks(self, world: World) -> float:
        """Return the value over the batches of all ranks."""
        return self._mean.compute(world)


def metric_args_of_loss(loss: object) -> dict[str, object]:
    """Return the arguments of metrics that a loss of torch implies: ``ignore_index`` and ``from_logits``."""
    loss = getattr(loss, "func", loss)  # unwraps a partial
    name = type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", "")
    found: dict[str, object] = {}
    if isinstance(ignored := getattr(loss, "ignore_index", None), int):
        found["ignore_index"] = ignored
    if name in LOGITS_BY_LOSS:
        found["from_logits"] = LOGITS_BY_LOSS[name]
    return found


def accuracy(
    *, task: str | None = None, ignore_index: int | None = None, from_logits: bool | None = None
) -> NamedMetric:
    """The fraction of targets that are predicted; for several labels per sample, the fraction of the labels."""

    def hits(batch: Aligned, task: Task) -> tuple[Tensor, Tensor | int]:
        is_class = task.kind == "multiclass"
        predicted = batch.scores.argmax(-1) if is_class else (batch.scores > 0.5).long()
        return _counted(predicted == batch.target, batch)

    make = _measures("accuracy", lambda task, device: Mean(hits))
    return NamedMetric("accuracy", make, task=task, ignore_index=ignore_index, from_logits=from_logits)


def top_k(k: int = 5, *, ignore_index: int | None = None) -> NamedMetric:
    """The fraction of targets that are among the ``k`` classes with the highest scores."""

    def hits(batch: Aligned, task: Task) -> tuple[Tensor, Tensor | int]:
        if k >= task.size:
            raise UsageError(f"each target is among {k} of {task.size} classes", remedy="give a smaller k")
        best = batch.scores.topk(k, dim=-1).indices
        return _counted((best == batch.target[:, None]).any(-1), batch)

    make = _measures(f"top_{k}", lambda task, device: Mean(hits), ("multiclass",))
    return NamedMetric(f"top_{k}", make, ignore_index=ignore_index)


top5 = partial(top_k, k=5)


def perplexity(*, ignore_index: int | None = None) -> NamedMetric:
    """exp of the mean cross-entropy of the targets."""

    def surprise(batch: Aligned, task: Task) -> tuple[Tensor, Tensor | int]:
        logarithms = batch.scores.float() if task.are_logits else batch.scores.float().log()
        assert batch.counts is not None
        target = torch.where(batch.counts, batch.target, IGNORE)
        total = F.cross_entropy(logarithms, target, reduction="sum", ignore_index=IGNORE)
        return total, batch.counts.sum()

    make = _measures("perplexity", lambda task, device: Mean(surprise, math.exp), ("multiclass",))
    return NamedMetric("perplexity", make, ignore_index=ignore_index)


def _no_batch(batch: Aligned, task: Task) -> tuple[Tensor, Tensor | int]:
    raise AssertionError("it takes losses, and no batches")


def _error(name: str, of: Callable[[Tensor], Tensor], finish: Callable[[float], float] = float) -> NamedMetric:
    def errors(batch: Aligned, task: Task) -> tuple[Tensor, Tensor | int]:
        found = of(widest(batch.scores) - widest(batch.target))
        return found.sum(), found.numel()

    return NamedMetric(name, lambda task, device: Mean(errors, finish), is_regression=True)


def mae() -> NamedMetric:
    """The mean of |output - target|."""
    return _error("mae", torch.abs)


def mse() -> NamedMetric:
    """The mean of (output - target)^2."""
    return _error("mse", torch.square)


def rmse() -> NamedMetric:
    """The square root of the mean of (output - target)^2."""
    return _error("rmse", torch.square, math.sqrt)


def _counted(right: Tensor, batch: Aligned) -> tuple[Tensor, Tensor | int]:
    assert batch.counts is not None
    return (right & batch.counts).sum(), batch.counts.sum()


def _measures(
    name: str, make: Callable[[Task, torch.device], Measure], kinds: tuple[str, ...] = TASKS
) -> Callable[[Task, torch.device], Measure]:
    """Return ``make``, restricted to the tasks that the metric is defined for."""

    def made(task: Task, device: torch.device) -> Measure:
        if task.kind not in kinds:
            defined = " and ".join(kinds)
            raise UsageError(f"it is defined for {defined} tasks, and this one is {task.kind}", remedy="leave it out")
        return make(task, device)

    return made


CLASSIFICATION = {
    "precision": "Precision",
    "recall": "Recall",
    "specificity": "Specificity",
    "f1": "F1Score",
    "balanced_accuracy": "Accuracy",
    "auroc": "AUROC",
    "average_precision": "AveragePrecision",
    "matthews": "MatthewsCorrCoef",
    "cohen_kappa": "CohenKappa",
    "calibration_error": "CalibrationError",
    "iou": "JaccardIndex",
}
"""Metrics of classes, and their names in ``torchmetrics`` without the kind of task."""
REGRESSION = {
    "r2": "R2Score",
    "mape": "MeanAbsolutePercentageError",
    "pearson": "PearsonCorrCoef",
    "spearman": "SpearmanCorrCoef",
}


def classification_metric(
    name: str,
    *,
    task: str | None = None,
    ignore_index: int | None = None,
    from_logits: bool | None = None,
    **options: object,
) -> NamedMetric:
    """Return a classification metric of ``torchmetrics``; ``options`` are further arguments of its class."""
    module = _torchmetrics("classification", name)
    by_kind = {kind: getattr(module, f"{kind.capitalize()}{CLASSIFICATION[name]}", None) for kind in TASKS}
    is_balanced = name == "balanced_accuracy"
    if is_balanced:  # torchmetrics has it for classes only
        by_kind = {"binary": by_kind["multiclass"], "multiclass": by_kind["multiclass"]}
        options = {"average": "macro", **options}

    def make(task: Task, device: torch.device) -> Measure:
        given: dict[str, Any] = {"ignore_index": IGNORE if ignore_index is None else ignore_index, **options}
        if task.kind == "multilabel":
            given["num_labels"] = task.size
        elif task.kind == "multiclass" or is_balanced:
            given["num_classes"] = max(2, task.size)
        metric = _made(by_kind[task.kind], given)
        metric.validate_args = False  # validation waits for the device in each update
        return TorchmetricsMeasure(metric.to(device), classes_for_scores=is_balanced and task.kind == "binary")

    kinds = tuple(kind for kind, found in by_kind.items() if found is not None)
    made = _measures(name, make, kinds)
    return NamedMetric(name, made, task=task, ignore_index=ignore_index, from_logits=from_logits)


def regression_metric(name: str, **options: object) -> NamedMetric:
    """Return a regression metric of ``torchmetrics``; ``options`` are further arguments of its class."""
    found = getattr(_torchmetrics("regression", name), REGRESSION[name])
    takes_size = "num_outputs" in inspect.signature(found).parameters

    def make(task: Task, device: torch.device) -> Measure:
        size = {"num_outputs": task.size} if takes_size else {}
        return TorchmetricsMeasure(_made(found, {**size, **options}).to(device))

    return NamedMetric(name, make, is_regression=True)


def _torchmetrics(module: str, name: str) -> Any:
    """Import a module of ``torchmetrics``. Raises MissingExtra if it is not installed."""
    if importlib.util.find_spec("torchmetrics") is None:
        raise MissingExtra("torchmetrics", needed_for=f"the metric {name!r}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"torchmetrics.{module}")


def _made(found: Any, options: Mapping[str, Any]) -> Any:
    """Construct a metric of ``torchmetrics``. Raises UsageError for arguments that it does not accept."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return found(**options)
    except (TypeError, ValueError) as error:
        accepted = ", ".join(
            name for name in inspect.signature(found).parameters if name not in ("validate_args", "kwargs")
        )
        raise UsageError(text_of(error), remedy=f"args of {found.__name__}: {accepted}") from None


precision = partial(classification_metric, "precision")
recall = partial(classification_metric, "recall")
specificity = partial(classification_metric, "specificity")
f1 = partial(classification_metric, "f1")
balanced_accuracy = partial(classification_metric, "balanced_accuracy")
auroc = partial(classification_metric, "auroc")
average_precision = partial(classification_metric, "average_precision")
matthews = partial(classification_metric, "matthews")
cohen_kappa = partial(classification_metric, "cohen_kappa")
calibration_error = partial(classification_metric, "calibration_error")
iou = partial(classification_metric, "iou")
r2 = partial(regression_metric, "r2")
mape = partial(regression_metric, "mape")
pearson = partial(regression_metric, "pearson")
spearman = partial(regression_metric, "spearman")
