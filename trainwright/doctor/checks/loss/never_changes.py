"""See the function."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.finding import Measured

MIN_STEPS = 16
"""Recorded steps with the same loss."""
ROUNDING = 2e-6
"""Relative: what float32 leaves of equal sums."""
LN_2 = math.log(2)


@check(
    names_cause=False,
    stage="loss",
    confidence=0.9,
    explains=(
        "loss.no_better_than_constant",
        "model.input_unused",
        "model.output_same_for_all_samples",
        "optim.weights_never_move",
    ),
)
def never_changes(run: RunContext) -> Iterator[Result]:
    """The loss has the same value in every step, whatever the batch is and although updates are made.

    How it is detected: the losses of at least 16 recorded steps from the first on are equal up to rounding of float32.

    Exceptions: a loss of exactly 0 whose gradient is not 0, as that of a policy gradient with normalized advantages.

    Usual cause: the loss does not depend on what is learned: its parts cancel, its input is constant, or it is a
    number. For a preference loss (DPO) that stays at ln 2 = 0.6931: the reference model is the policy itself, so the
    margin is always 0.

    Looks like: optim.weights_never_move, where the loss changes from batch to batch.

    Fix: print what the loss is computed from for two different batches. For DPO: `reference = copy.deepcopy(policy)`
    before training, in eval mode and without gradients.

    Sources: huggingface/trl#1311, #1627; eric-mitchell/direct-preference-optimization#46.
    """
    losses = [each.loss for each in run.steps if math.isfinite(each.loss)]
    if len(losses) < MIN_STEPS or not run.steps or run.steps[0].step > 1:
        return
    low, high = min(losses), max(losses)
    if high - low > ROUNDING * max(abs(low), abs(high)):
        yield Passed(f"losses from {low:.4g} to {high:.4g}")
        return
    norms = [each.grad_norm for each in run.steps if math.isfinite(each.grad_norm)]
    if not high and any(norms):
        yield NotApplicable("the loss is 0 and its gradient is not")
        return
    evidence: list[Measured] = [("least and largest loss", [low, high], "different"), ("steps", len(losses))]
    is_preference = abs(high - LN_2) < 1e-5
    yield run.finding(
        run.last_step,
        symptom=f"the loss is {high:.6g} in all of {len(losses)} recorded steps",
        cause="the loss stays at ln 2 = 0.6931: the margin is always 0, as where the reference model of DPO is the "
        "policy itself, or both scores of a pair are the same"
        if is_preference
        else "",
        since_step=1,
        evidence=evidence,
    )
