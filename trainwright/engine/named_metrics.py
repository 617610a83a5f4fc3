"""Metrics by name: ``tw.fit(metrics=["accuracy", "f1"])``.

Accuracy, top-k, errors and perplexity are sums divided by counts, and need no package. All others are metrics of
``torchmetrics`` with its defaults; averages over classes are macro averages unless ``args`` set another.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.distributed.group import SOLO, World
from trainwright.engine.chunked import IGNORE
from trainwright.engine.loss import Loss
from trainwright.engine.metrics import synchronized
from trainwright.engine.user_log import widest
from trainwright.errors import UsageError, import_optional, require_choice, text_of

TASKS = ("binary", "multiclass", "multilabel")
REGRESSION_TASK = ("regression",)
CUSTOM_METRIC_REMEDY = "or give a function of your own: metrics={'name': lambda outputs, targets: ...}"


@dataclass(frozen=True)
class Task:
    """Meaning of outputs and targets.

    Attributes:
        kind: "binary", "multiclass", "multilabel" or "regression".
        size: Number of classes, labels or, in a regression, values of a sample. Binary: outputs of a sample, 1 or 2.
        class_dim: Dimension of the outputs that has the classes or labels.
        are_logits: True if the outputs are logits, False if they are probabilities.
        are_logits_certain: False if ``are_logits`` was guessed from the values of the first batch.
        soft: True if multiclass targets are a probability for each class.
    """

    kind: str
    size: int = 1
    class_dim: int = 1
    are_logits: bool = True
    are_logits_certain: bool = True
    soft: bool = False


class Aligned(NamedTuple):
    """One batch, flattened. ``counts`` is False for ignored targets; None: all count.

    Binary: probabilities (M,) and targets (M,). Multiclass: outputs (M, C) and targets (M,). Multilabel: probabilities
    and targets (M, C). Regression: both as in the batch, of one shape.
    """

    scores: Tensor
    target: Tensor
    counts: Tensor | None = None


def regression_task(outputs: Tensor, targets: Tensor) -> Task:
    """Return the task for a regression metric. Raises UsageError if the shapes do not match."""
    if _squeezed(outputs) != _squeezed(targets):
        raise UsageError(f"{_shapes(outputs, targets)} do not fit each other", remedy="give both the same shape")
    return Task("regression", math.prod(targets.shape[1:]))


def classification_task(
    outputs: Tensor, targets: Tensor, *, stated: str | None, ignored: int, are_logits: bool | None
) -> Task:
    """Return the task for a classification metric. Waits for the device.

    Args:
        outputs: Scores of the first batch.
        targets: Classes, labels of 0 and 1, or a probability for each class.
        stated: The task, if the user has stated it.
        ignored: A target that does not count.
        are_logits: True if outputs of binary and multilabel tasks are logits; None if neither the loss nor the user
            says so.

    Raises:
        UsageError: Shapes and values allow no task, or more than one.
    """
    if not outputs.is_floating_point():
        raise UsageError(
            f"the outputs are {outputs.dtype}, not scores", remedy=f"return the logits, {CUSTOM_METRIC_REMEDY}"
        )
    if (class_dim := _class_dim(outputs, targets)) is not None:
        size = outputs.shape[class_dim]
        if size > 1 and (stated != "binary" or size == 2):
            kind = "binary" if stated == "binary" else "multiclass"
            return Task(kind, size, class_dim, not _are_probabilities(outputs, class_dim))
    if _squeezed(outputs) != _squeezed(targets):
        remedy = f"give outputs (N, C) and targets (N,), or both of one shape, {CUSTOM_METRIC_REMEDY}"
        raise UsageError(f"{_shapes(outputs, targets)} do not fit each other", remedy=remedy)
    kind = _kind_of_same_shape(outputs, targets, stated, ignored)
    if kind == "multiclass":
        return Task(kind, outputs.shape[1], 1, not _are_probabilities(outputs, 1), soft=True)
    size = outputs.shape[1] if kind == "multilabel" else 1
    if are_logits is not None:
        return Task(kind, size, are_logits=are_logits)
    return Task(kind, size, are_logits=bool(_are_outside(outputs)), are_logits_certain=False)


def _class_dim(outputs: Tensor, targets: Tensor) -> int | None:
    """Return the dimension of the outputs that integer targets do not have; None if the shapes differ otherwise."""
    if targets.is_floating_point() or outputs.dim() != targets.dim() + 1 or outputs.dim() < 2:
        return None
    rest = {dim: (*outputs.shape[:dim], *outputs.shape[dim + 1 :]) for dim in (1, outputs.dim() - 1)}
    fitting = [dim for dim, shape in rest.items() if shape == tuple(targets.shape)]
    if len(fitting) > 1:
        what = f"{_shapes(outputs, targets)} may have the classes in dimension {fitting[0]} or {fitting[1]}"
        raise UsageError(
            what,
            remedy=f"flatten both in the loss, and return them: tw.Loss(..., outputs, targets), {CUSTOM_METRIC_REMEDY}",
        )
    return fitting[0] if fitting else None


def _kind_of_same_shape(outputs: Tensor, targets: Tensor, stated: str | None, ignored: int) -> str:
    """Return the task if there is an output for each target."""
    has_columns = outputs.dim() > 1 and outputs.shape == targets.shape and outputs.shape[1] > 1
    if stated == "multiclass" and has_columns:
        return stated
    if not bool(((targets == 0) | (targets == 1) | (targets == ignored)).all()):
        remedy = "give an output for each class, (N, C); for targets that are numbers take mae, mse or r2"
        raise UsageError(f"{_shapes(outputs, targets)}, and the targets are not 0 and 1", remedy=remedy)
    if not has_columns:
        return "binary"
    if stated in ("binary", "multilabel"):
        return stated
    if outputs.dim() > 2 or bool((targets.sum(1) == 1).all()):
        why = "may be one label for each value, or several for each sample" if outputs.dim() > 2 else "have one 1 a row"
        raise UsageError(
            f"{_shapes(outputs, targets)} {why}: the task is not clear",
            remedy=f"state it: metrics=[{{'use': ..., 'args': {{'task': 'multilabel'}}}}], one of {', '.join(TASKS)}",
        )
    return "multilabel"


def aligned(outputs: Tensor, targets: Tensor, task: Task, ignored: int) -> Aligned:
    """Flatten a batch, without waiting for the device. Raises UsageError for shapes that do not match."""
    outputs, targets = outputs.detach(), targets.detach()
    if task.kind == "regression":
        regression_task(outputs, targets)
        return Aligned(outputs.reshape(targets.shape), targets)
    if task.kind == "multiclass":
        scores = outputs.movedim(task.class_dim, -1).reshape(-1, task.size)
        target = targets.movedim(1, -1).argmax(-1) if task.soft else targets
        return Aligned(scores, target.reshape(-1), target.reshape(-1) != ignored)
    if task.kind == "binary" and task.size == 2:  # the second of two classes is the positive one
        both = outputs.movedim(task.class_dim, -1)
        scores = (both.softmax(-1) if task.are_logits else both)[..., 1]
    else:
        scores = outputs.sigmoid() if task.are_logits else outputs
    counts = targets != ignored
    if task.kind == "binary":
        return Aligned(scores.reshape(-1), targets.reshape(-1).long(), counts.reshape(-1))
    flat = [each.movedim(1, -1).reshape(-1, task.size) for each in (scores, targets, counts)]
    return Aligned(flat[0], flat[1].long(), flat[2])


def contradicts(outputs: Tensor, task: Task) -> Tensor | None:
    """Return a bool tensor: True if outputs assumed to be probabilities are not. None if the meaning is certain."""
    return None if task.are_logits or task.are_logits_certain else _are_outside(outputs)


def _are_outside(outputs: Tensor) -> Tensor:
    return ((outputs < 0) | (outputs > 1)).any()


def _are_probabilities(outputs: Tensor, dim: int) -> bool:
    """Return True if the outputs along ``dim`` are probabilities that sum to 1."""
    return bool((outputs >= 0).all() & ((outputs.sum(dim) - 1).abs() < 1e-3).all())


def _squeezed(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape without dimensions of size 1 after the first."""
    return (*tensor.shape[:1], *(size for size in tensor.shape[1:] if size != 1))


def _shapes(outputs: Tensor, targets: Tensor) -> str:
    return f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"


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
        make: Returns the measure for a task on a device.
        kinds: Kinds of tasks that the metric is defined for.
        task: Overrides the inferred task.
        ignore_index: Target that is not counted.
        from_logits: True if outputs are logits; None to infer it.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Task, torch.device], Measure],
        *,
        kinds: Collection[str] = TASKS,
        task: str | None = None,
        ignore_index: int | None = None,
        from_logits: bool | None = None,
    ) -> None:
        if task is not None:
            require_choice(f"the task of the metric {name!r}", task, TASKS)
        self._name = name
        self._make = make
        self._kinds = kinds
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
        if self._kinds == REGRESSION_TASK:
            return regression_task(outputs, targets)
        task = classification_task(
            outputs, targets, stated=self._stated, ignored=self._ignored, are_logits=self._from_logits
        )
        if task.kind not in self._kinds:
            defined = " and ".join(self._kinds)
            raise UsageError(f"it is defined for {defined} tasks, and this one is {task.kind}", remedy="leave it out")
        return task

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
    """Perplexity for a built-in cross-entropy loss: exp of the mean loss. Needs no logits."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._mean = Mean(_no_batch, math.exp)

    def take_loss(self, loss: Loss) -> None:
        """Add the loss of a batch."""
        self._mean.add(loss.total.detach(), loss.weight)

    def update(self, outputs: object, targets: object) -> None:
        """Do nothing: ``take_loss`` receives all that is needed."""

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

    return NamedMetric(
        "accuracy", lambda _task, _device: Mean(hits), task=task, ignore_index=ignore_index, from_logits=from_logits
    )


def top_k(k: int = 5, *, ignore_index: int | None = None) -> NamedMetric:
    """The fraction of targets that are among the ``k`` classes with the highest scores."""

    def hits(batch: Aligned, task: Task) -> tuple[Tensor, Tensor | int]:
        if k >= task.size:
            raise UsageError(f"each target is among {k} of {task.size} classes", remedy="give a smaller k")
        best = batch.scores.topk(k, dim=-1).indices
        return _counted((best == batch.target[:, None]).any(-1), batch)

    return NamedMetric(f"top_{k}", lambda _task, _device: Mean(hits), kinds=["multiclass"], ignore_index=ignore_index)


top5 = partial(top_k, k=5)


def perplexity(*, ignore_index: int | None = None) -> NamedMetric:
    """exp of the mean cross-entropy of the targets."""

    def surprise(batch: Aligned, task: Task) -> tuple[Tensor, Tensor | int]:
        logarithms = batch.scores.float() if task.are_logits else batch.scores.float().log()
        assert batch.counts is not None
        target = torch.where(batch.counts, batch.target, IGNORE)
        total = F.cross_entropy(logarithms, target, reduction="sum", ignore_index=IGNORE)
        return total, batch.counts.sum()

    return NamedMetric(
        "perplexity",
        lambda _task, _device: Mean(surprise, math.exp),
        kinds=["multiclass"],
        ignore_index=ignore_index,
    )


def _no_batch(_batch: Aligned, _task: Task) -> tuple[Tensor, Tensor | int]:
    raise AssertionError("it takes losses, and no batches")


def _error(name: str, of: Callable[[Tensor], Tensor], finish: Callable[[float], float] = float) -> NamedMetric:
    def errors(batch: Aligned, _task: Task) -> tuple[Tensor, Tensor | int]:
        found = of(widest(batch.scores) - widest(batch.target))
        return found.sum(), found.numel()

    return NamedMetric(name, lambda _task, _device: Mean(errors, finish), kinds=REGRESSION_TASK)


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
"""Classification metrics by name, with the class name in ``torchmetrics`` without its prefix for the task."""
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
    module = _torchmetrics(name).classification
    by_kind = {kind: getattr(module, f"{kind.capitalize()}{CLASSIFICATION[name]}", None) for kind in TASKS}
    is_balanced = name == "balanced_accuracy"
    if is_balanced:  # torchmetrics defines macro accuracy for multiclass only
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

    kinds = [kind for kind, found in by_kind.items() if found is not None]
    return NamedMetric(name, make, kinds=kinds, task=task, ignore_index=ignore_index, from_logits=from_logits)


def regression_metric(name: str, **options: object) -> NamedMetric:
    """Return a regression metric of ``torchmetrics``; ``options`` are further arguments of its class."""
    found = getattr(_torchmetrics(name).regression, REGRESSION[name])
    takes_size = "num_outputs" in inspect.signature(found).parameters

    def make(task: Task, device: torch.device) -> Measure:
        size = {"num_outputs": task.size} if takes_size else {}
        return TorchmetricsMeasure(_made(found, {**size, **options}).to(device))

    return NamedMetric(name, make, kinds=REGRESSION_TASK)


def _torchmetrics(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_optional("torchmetrics", needed_for=f"the metric {name!r}")


def _made(found: Any, options: Mapping[str, Any]) -> Any:
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
