"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.loss import LossFacts
from trainwright.doctor.shared_loss import calls, where_of

MIN_STEPS = 8
"""Examined steps in a row: a last layer that begins at 0 leaves it sooner."""


@check(
    names_cause=False,
    stage="forward",
    confidence=0.9,
    needs=LossFacts,
    explains=(
        "loss.no_better_than_constant",
        "model.input_unused",
        "model.output_same_for_all_samples",
        "optim.weights_never_move",
    ),
)
def predictions_identical(run: RunContext) -> Iterator[Result]:
    """The loss gets the same prediction for every sample of a batch, although the targets differ.

    How it is detected: the rows of the input of a loss function are equal up to rounding in 8 examined steps in a row.

    Usual cause: a softmax or a normalization over a single value, dead ReLUs, an input that is multiplied by 0 or
    masked away, or an index that takes the same sample for all.

    Looks like: loss.no_better_than_constant, where predictions differ and tell nothing.

    Fix: print the standard deviation over the samples after each layer, and look for the first layer where it is 0.

    Sources: pytorch/pytorch#19250, #45687 (group norm over one value); UMLAUT (CHI 2021).
    """
    for step, _, call in calls(run):
        if call.identical >= MIN_STEPS:
            yield run.finding(
                step,
                symptom=f"all samples of a batch have the same prediction in {call.op}, in the last {call.identical} "
                "examined steps",
                where=where_of(call),
                evidence=[("examined steps with identical predictions", call.identical, 0)],
            )
            return
