"""The law of how far updates go."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, RemedyTrial, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import ComparisonsFacts
from trainwright.doctor.vitals.facts import ReachFacts, VitalsFacts

FIRST, SECOND, APART = 40, 48, 8
"""Steps before the first measurement, before the second, and between any two that count."""
TRIAL, LONG = 96, 128
"""Steps of a run that is no trial of a few; those after which even a long run is no more at its begin."""
TRIES = 4
"""Looks at which it may be impossible to measure."""
MUCH = 0.02
"""Of the loss: what is forgone at the least."""
STEADY = 0.5
"""Of the highest rate: below it the rate is in its warm-up or at its end."""
KNOWS = 0.8
"""Of the loss at chance: with less the model was trained before."""


def way_is_used(case: Case) -> Iterator[Verdict]:
    """Three times the way of the last steps, straight on, lowers their loss by less than 1.5 times what the way did."""
    if case.last_step < FIRST:
        return
    if (why := _why_not(case)) is not None:
        yield NotApplicable(why)
        return
    known = [facts for _, facts in case.every(ReachFacts)]
    tried = case.outcomes(ReachFacts.experiment)
    last = known[-1] if known else None
    is_due = len(tried) < TRIES if last is None else _is_straight(last) and case.last_step >= SECOND
    if is_due and _is_steady(case, case.last_step) and (not tried or case.last_step >= tried[-1].step + APART):
        yield ExperimentRequest(ReachFacts.experiment)
    if last is None:
        yield NotApplicable(case.blind(ReachFacts) or "the learning rate was not near its highest value at a look")
        return
    counted = [each for each in known if _is_steady(case, each.until)]
    if len(counted) < 2 or not all(map(_is_straight, counted)):
        yield Holds(f"loss {last.before:.4g} before step {last.since}, {last.now:.4g} now, {last.beyond:.4g} beyond")
        return
    first, last = counted[0], counted[-1]
    lr = max(each.lr for each in case.watched if each.step <= last.until)
    yield finding(
        "law.vitals.way_is_used",
        "warning" if last.until >= LONG or (case.finished and case.last_step >= TRIAL) else "info",
        case.last_step,
        symptom=f"steps {last.since} to {last.until} took the loss of their batches from {last.before:.4g} to "
        f"{last.now:.4g}; three times as far in the same direction it is {last.beyond:.4g}",
        cause=f"the updates are several times too small, at a learning rate of {lr:.3g}: that rate, or what scales the "
        "loss, the gradients or the update",
        remedy=f"three times the learning rate, {3 * lr:.3g}; look at factors, means and clips between the loss and "
        "the update",
        sure=0.75,
        stage="update",
        since_step=first.since,
        evidence=[
            ("loss three times as far", round(last.beyond, 6), f">= {1.5 * last.now - 0.5 * last.before:.6g}"),
            ("the same before", [round(each, 6) for each in (first.before, first.now, first.beyond)]),
        ],
        trial=RemedyTrial("other_lr", {"factor": 3.0, "recorded": True}),
    )


def _is_straight(facts: ReachFacts) -> bool:
    forgone = facts.now - facts.beyond
    return facts.surely and facts.before > facts.now and forgone > MUCH * abs(facts.now)


def _is_steady(case: Case, until: int) -> bool:
    """Whether the rate of the last 16 steps up to ``until`` was near its highest value so far."""
    rates = [(each.step, each.lr) for each in case.watched if each.step <= until]
    lately = [lr for step, lr in rates if step > until - 16]
    return bool(lately) and min(lately) >= STEADY * max(lr for _, lr in rates) > 0.0


def _why_not(case: Case) -> str | None:
    """Why the law says nothing of this run."""
    if (
        len({each["optimizer"] for kind, each in case.watched[-1].events if kind == "step"} if case.watched else ())
        != 1
    ):
        return "several optimizers play a game, in which no loss has to fall"
    vitals = case.newest(VitalsFacts)
    if vitals is not None and vitals.frozen_still:
        return "a part is frozen: what was trained before is trained on with care"
    first = next((facts for step, facts in case.every(ComparisonsFacts) if step == 1), None)
    if first is not None and any(math.isfinite(each.value) and each.value < KNOWS * each.blank for each in first.calls):
        return "the model was trained before"
    return None
