"""See the function."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext

RAISED = 3.0
"""Times the usual learning rate, or that of the step before: no schedule that has settled, no ramp."""
DONE = {"warn": "the update was made", "skip": "the update was left out", "rollback": "the run went back"}


@check(names_cause=False, stage="backward", confidence=0.6)
def spike(run: RunContext) -> Iterator[Result]:
    """The gradient norm of a step is many times the usual one, and larger than at the start of the run.

    How it is detected: the spike detector of the watch, in every step.

    Exceptions: reported only with -v where it was clipped, where the loss has come back, or where the loop raises the
    learning rate step by step.

    Usual cause: a batch that is unlike the others, a learning rate that was raised, or a steep place.

    Fix: look at the samples of this step. Clip the gradient norm, or leave such updates out: `on_spike="skip"` in
    `tw.watch`, `spikes.policy: skip` in a recipe.
    """
    spikes = [each for each in run.steps if (seen := each.values.get("spike") or ()) and seen[0] > seen[2]]
    if not spikes:
        return
    first = spikes[0]
    norm, usual, _, action = first.values["spike"]
    clipped = any(kind == "clip" and each["at"] < norm for kind, each in first.events)
    harmless = action == "warn" and (clipped or _is_ramp(run, first.step) or _went_on_well(run, first.step))
    yield run.finding(
        first.step,
        symptom=f"the gradient norm is {norm:.3g}, {norm / usual:.0f} times the usual one",
        severity="info" if harmless else "warning",
        since_step=first.step,
        evidence=[
            ("gradient norm before clipping", norm, usual),
            ("steps like this", len(spikes), 0),
            ("what was done", DONE.get(action, action)),
        ],
    )


def _went_on_well(run: RunContext, step: int) -> bool:
    """Whether the loss soon after it, or by now, is no higher than just before, noise included."""
    before = [each.loss for each in run.steps if step - 16 <= each.step < step]
    after = [each.loss for each in run.steps if step < each.step]
    soon = [each.loss for each in run.steps if step < each.step <= step + 8]
    return bool(soon and before) and min(statistics.median(soon), statistics.median(after[-8:])) <= max(before)


def _is_ramp(run: RunContext, step: int) -> bool:
    """Whether the rate of the last 8 updates is far above the usual one, and was not raised in one step."""
    rates = [each.lr for each in run.steps if each.step <= step]
    lately = rates[-32:]
    raised = len(lately) > 2 and max(lately[-8:]) > RAISED * statistics.median(lately)
    jumps = [n for n in range(max(1, len(rates) - 8), len(rates)) if rates[n] > RAISED * max(rates[:n]) > 0.0]
    return raised and not jumps
