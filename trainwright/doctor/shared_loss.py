"""What several checks of the loss read from its calls."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.loss import LossFacts, MeasuredLoss
from trainwright.runs.records import Where

NOTHING_IS_LEARNED = (
    "data.label_feature_misaligned",
    "loss.falls_without_bound",
    "loss.never_changes",
    "loss.no_better_than_constant",
    "model.init_symmetric",
    "model.init_too_large",
    "model.input_unused",
    "model.output_same_for_all_samples",
    "optim.lr_too_high",
    "optim.lr_too_low",
    "optim.weights_never_move",
)
"""Findings that follow where a loss function is called with the wrong arguments."""


def calls(run: RunContext) -> Iterator[tuple[int, LossFacts, MeasuredLoss]]:
    """Each measured call of a loss function with the step of the measurement, the newest first."""
    for step, facts in reversed(run.every(LossFacts)):
        for call in facts.given:
            yield step, facts, call


def over_most_steps(run: RunContext) -> LossFacts | None:
    """The newest facts of those that cover most steps: live ones. A replay, which covers one step, may be newer."""
    return max((facts for _, facts in reversed(run.every(LossFacts))), key=lambda each: each.steps, default=None)


def where_of(call: MeasuredLoss, module: str | None = None) -> Where:
    """The place of a call. ``module`` instead of the module that makes it."""
    op = None if call.op in ("squared error", "absolute error", "entropy", "cosine similarity") else call.op
    return Where(op=op, module=call.module if module is None else module, source=call.line)
