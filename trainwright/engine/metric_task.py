"""Infers the task of a metric (binary, multiclass, multilabel, regression) from the first batch, and aligns batches.

Shapes: N samples, C classes or labels, M counted values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from trainwright.errors import UsageError

TASKS = ("binary", "multiclass", "multilabel")
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
    """Return the task of a metric of numbers. Raises UsageError if the shapes do not match."""
    if _squeezed(outputs) != _squeezed(targets):
        raise UsageError(f"{_shapes(outputs, targets)} do not fit each other", remedy="give both the same shape")
    return Task("regression", math.prod(targets.shape[1:]))


def classification_task(
    outputs: Tensor, targets: Tensor, *, stated: str | None, ignored: int, are_logits: bool | None
) -> Task:
    """Return the task of a metric of classes. Waits for the device.

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
    """Return the dimension of the outputs that integer targets do not have."""
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
