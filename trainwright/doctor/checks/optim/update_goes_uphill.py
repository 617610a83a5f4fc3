"""See the function."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext, by_experiment
from trainwright.doctor.facts.updates import UpdateFacts

RISES = 0.01
"""A cosine above it is no rounding: between gradient and update those of real loops are below -0.1, or above 0.1."""
MIN_UPDATES, FEW = 3, 4


@check(
    names_cause=False,
    stage="update",
    severity="critical",
    confidence=0.95,
    needs=UpdateFacts,
    explains=("optim.lr_too_high", "optim.lr_too_low"),
)
def update_goes_uphill(run: RunContext) -> Iterator[Result]:
    """Updates raise the loss: they go along the gradient, or the gradient's sign is turned before them.

    How it is detected: the cosine between gradient and replayed update is above 0 in three updates, or all gradients at
    the live update have the opposite sign of those of the backward passes, and the loss is higher at the end.

    Exceptions: reported only with -v where it is not known that the loss is to fall.

    Usual cause: `maximize=True`, a hook or a line that negates `.grad`, or the rule of a custom optimizer.

    Looks like: loss.wrong_sign, where the loss itself is negated.

    Fix: look at `maximize`, at hooks, and at what is done with `.grad` between `backward()` and `step()`.
    """
    every = run.every(UpdateFacts)
    known = [(step, facts) for step, facts in every if facts.slopes and all(map(math.isfinite, facts.slopes))]
    uphill = [(step, facts) for step, facts in known if min(facts.slopes) > RISES]
    turned = [(step, facts) for step, facts in every if facts.is_turned]
    is_loss = _wants_to_fall(run)
    if every and every[-1][1].maximises and not is_loss:
        yield NotApplicable("the optimizer is to maximize")
    elif len(known) >= MIN_UPDATES and len(uphill) == len(known):
        yield run.finding(
            uphill[-1][0],
            symptom=f"every update goes along the gradient, uphill: cosine {min(uphill[-1][1].slopes):.2f}",
            severity="critical" if is_loss else "info",
            since_step=uphill[0][0],
            evidence=[("cosine between the gradient and the update", min(uphill[-1][1].slopes), "below 0")],
        )
    elif turned and is_loss:
        losses = [each.loss for each in run.steps if math.isfinite(each.loss)]
        harms = len(losses) >= 2 * FEW and min(losses[-FEW:]) > max(losses[:FEW])
        yield run.finding(
            turned[-1][0],
            symptom="the gradients at the update have the opposite sign of those of the backward passes",
            severity="warning" if harms else "info",
            since_step=turned[0][0],
            evidence=[("steps like this", f"{len(turned)} of {len(every)} that were examined", 0)],
        )
    else:
        yield Passed(f"{len(every)} updates")


def _wants_to_fall(run: RunContext) -> bool:
    """Whether every argument of backward is a loss that is bounded below and not above."""
    outcomes = by_experiment(run.records).get("loss", [])
    given = [each.get("wants") for exam in outcomes for each in exam.values.get("given", ())]
    return {each for each in given if each} == {1}
