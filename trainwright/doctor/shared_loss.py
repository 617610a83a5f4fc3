"""Helpers of the checks that read calls of loss functions."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.loss import LossFacts, MeasuredLoss
from trainwright.runs.records import Where

CONSEQUENCES_OF_WRONG_ARGUMENTS = (
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
"""Findings that follow from wrong arguments of a loss function."""


def calls(run: RunContext) -> Iterator[tuple[int, LossFacts, MeasuredLoss]]:
    """Yields each measured call of a loss function with the step of the measurement, newest first."""
    for step, facts in reversed(run.every(LossFacts)):
        for call in facts.given:
            yield step, facts, call


def over_most_steps(run: RunContext) -> LossFacts | None:
    """Returns the newest facts that cover the most steps. A newer replay covers one step only."""
    return max((facts for _, facts in reversed(run.every(LossFacts))), key=lambda each: each.steps, default=None)


def where_of(call: MeasuredLoss, module: str | None = None) -> Where:
    """Returns the place of a call. ``module`` replaces the calling module."""
    op = None if call.op in ("squared error", "absolute error", "entropy", "cosine similarity") else call.op
    return Where(op=op, module=call.module if module is None else module, source=call.line)
