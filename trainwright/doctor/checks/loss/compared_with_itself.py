"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.loss import LossFacts
from trainwright.doctor.shared_loss import calls, where_of

MIN_STEPS = 6
"""Examined steps: a student may begin equal to its teacher."""


@check(
    stage="loss",
    confidence=0.9,
    needs=LossFacts,
    explains=(
        "loss.no_better_than_constant",
        "model.input_unused",
        "model.output_same_for_all_samples",
        "optim.weights_never_move",
        "loss.never_changes",
    ),
)
def compared_with_itself(run: RunContext) -> Iterator[Result]:
    """Prediction and target of the loss have the same values, so the loss is always 0.

    How it is detected: both arguments of a distance are equal, bit for bit, in all of at least 6 examined steps.

    Usual cause: one name stands for both, or the target was made of the output.

    Fix: pass the targets of the batch.
    """
    for step, _, call in calls(run):
        if call.itself and call.steps >= MIN_STEPS:
            yield run.finding(
                step,
                symptom=f"prediction and target of {call.op} have the same values in {call.steps} examined steps",
                since_step=1,
                where=where_of(call),
                evidence=[("loss", 0.0, "above 0")],
            )
            return
