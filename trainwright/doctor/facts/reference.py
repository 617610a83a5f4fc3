"""The traits of a run that are compared with those of a reference run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one recorded step."""

    step: int
    loss: float
    grad_norm: float
    lr: float


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Usual properties of a run. None, "" and () mean: not measured.

    Attributes:
        steps: Steps so far.
        calls: The most frequent order of the calls of a step.
        loss_calls: The loss functions, sorted.
        autocast: Fraction of updates whose forward pass ran under autocast.
        eval_modules: Modules that train in eval mode, sorted.
        evaluated_in_train: Evaluations in train mode; None without any evaluation.
        tensors: Number of trainable tensors that the optimizers hold.
        moved: Number of these that have changed.
        parameters: Number of parameters of each optimizer.
        rows: Rows of a step.
        shapes: Shapes of the inputs of a step, without the number of rows.
        scale: The largest standard deviation of an input; None for ids.
        new_rows: Fraction of the rows of the last steps that had not been read before.
        largest_target: The largest class or token id among the targets.
        course: The numbers of recorded steps.
    """

    steps: int = 0
    calls: str = ""
    loss_calls: tuple[str, ...] = ()
    autocast: float | None = None
    eval_modules: tuple[str, ...] | None = None
    evaluated_in_train: int | None = None
    tensors: int | None = None
    moved: int | None = None
    parameters: tuple[int, ...] = ()
    rows: int | None = None
    shapes: tuple[str, ...] = ()
    scale: float | None = None
    new_rows: float | None = None
    largest_target: int | None = None
    course: tuple[StepNumbers, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReferenceFacts:
    """The traits of the reference run, and its name."""

    experiment: ClassVar[str] = "reference"
    run: str
    traits: Traits
