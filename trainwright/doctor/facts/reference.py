"""The traits of a run that are compared with those of a reference run."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.calls import CallsFacts
from trainwright.doctor.facts.data import BatchFacts, RowsFacts, TargetsFacts
from trainwright.doctor.facts.loss import LossFacts
from trainwright.doctor.facts.modes import ModesFacts
from trainwright.doctor.facts.weights import WeightsFacts
from trainwright.doctor.finding import Measured
from trainwright.runs.json_values import JsonValue


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one recorded step."""

    step: int
    loss: float
    grad_norm: float
    lr: float


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Usual properties of a run. None, "" and () mean: not measured."""

    steps: int = 0  # Steps so far
    calls: str = ""  # The most frequent order of the calls of a step
    loss_calls: tuple[str, ...] = ()  # The loss functions, sorted
    autocast: float | None = None  # Fraction of updates whose forward pass ran under autocast
    eval_modules: tuple[str, ...] | None = None  # Modules that train in eval mode, sorted
    evaluated_in_train: int | None = None  # Evaluations in train mode; None without any evaluation
    tensors: int | None = None  # Number of trainable tensors that the optimizers hold
    moved: int | None = None  # Number of these that have changed
    parameters: tuple[int, ...] = ()  # Number of parameters of each optimizer
    rows: int | None = None  # Rows of a step
    shapes: tuple[str, ...] = ()  # Shapes of the inputs of a step, without the number of rows
    scale: float | None = None  # The largest standard deviation of an input; None for ids
    new_rows: float | None = None  # Fraction of the rows of the last steps that had not been read before
    largest_target: int | None = None  # The largest class or token id among the targets
    course: tuple[StepNumbers, ...] = ()  # The numbers of recorded steps


@dataclass(frozen=True, kw_only=True)
class ReferenceFacts:
    """The traits of the reference run, and its name."""

    experiment: ClassVar[str] = "reference"
    run: str
    traits: Traits


EVENT_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "autograd_grad": "backward",
    "zero_grad": "zero_grad",
    "unscale": "unscale_",
    "clip": "clip",
    "step": "step",
    "scaler_skipped": "step",
    "scaler_update": "scaler.update",
    "schedule": "scheduler.step",
}
"""Word for each kind of event. Other kinds are not part of the order of calls."""
MIN_STEPS = 8  # Minimum number of steps of a compared run. The first steps may be a warm-up of the loop.
MAX_POINTS = 128  # Maximum number of steps of a reference run whose numbers are kept
MIN_SPREAD = 0.25  # Relative differences of two runs up to this fraction are explained by seeds and batches


def traits_of(run: RunContext) -> Traits:
    """Returns the traits of a run."""
    steps = run.steps
    course = steps[:: max(1, math.ceil(len(steps) / MAX_POINTS))]
    words = Counter(" ".join(EVENT_WORDS[kind] for kind, _ in each.events if kind in EVENT_WORDS) for each in steps)
    updates = [value for each in steps for kind, value in each.events if kind == "step" and isinstance(value, dict)]
    modes, weights, calls = run.latest(ModesFacts), run.latest(WeightsFacts), run.latest(CallsFacts)
    batch, rows, targets = run.latest(BatchFacts), run.latest(RowsFacts), run.latest(TargetsFacts)
    losses = {call.op for _, facts in run.every(LossFacts) for call in facts.given}
    evaluations = modes and modes.num_evaluated_in_train + len(modes.evaluated_in_eval)
    return Traits(
        steps=run.last_step,
        calls=words.most_common(1)[0][0] if words else "",
        loss_calls=tuple(sorted(losses)),
        autocast=statistics.fmean(bool(each.get("autocast")) for each in updates) if updates else None,
        eval_modules=tuple(sorted(each.module for each in modes.eval if each.trained)) if modes else None,
        evaluated_in_train=modes.num_evaluated_in_train if modes and evaluations else None,
        tensors=weights.tensors if weights else None,
        moved=weights.moved if weights else None,
        parameters=tuple(each.parameters for each in calls.optimizers) if calls else (),
        rows=rows.batch if rows and rows.batch else None,
        shapes=tuple(str(list(each.shape[1:])) for each in batch.inputs) if batch else (),
        scale=max((each.std for each in batch.inputs if each.std is not None), default=None) if batch else None,
        new_rows=rows.new_lately if rows else None,
        largest_target=targets.largest if targets and targets.targets else None,
        course=tuple(StepNumbers(each.step, each.loss, each.grad_norm, each.lr) for each in course),
    )


def differing(rows: Sequence[tuple[str, JsonValue, JsonValue]]) -> list[Measured]:
    """Returns those rows (what, here, in the reference run) whose values are both known and differ."""
    unknown: tuple[JsonValue, ...] = (None, "", [])
    return [each for each in rows if each[1] not in unknown and each[2] not in unknown and each[1] != each[2]]


def differ(here: float | None, there: float | None, by: float = MIN_SPREAD) -> bool:
    """Returns True if two numbers differ by more than the fraction ``by`` of the larger one."""
    return here is not None and there is not None and abs(here - there) > by * max(abs(here), abs(there))


def differences(evidence: Sequence[Measured]) -> str:
    """Returns the first difference as a sentence."""
    what, here, there = (*evidence[0], None)[:3]
    more = f" (and {len(evidence) - 1} more)" if len(evidence) > 1 else ""
    return f"{what}: {_text(here)} here, {_text(there)} in the reference run{more}"


def _text(value: JsonValue) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else ", ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )
