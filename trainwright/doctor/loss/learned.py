"""The law of what was learned: in the end a model tells samples apart, or is still too young for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import Learned, LearnedFacts
from trainwright.doctor.loss.laws import named, where_of
from trainwright.doctor.trend import still_falls

LEARNED = 60
"""Steps after which something must have been learned."""
LEAST, CERTAIN = 0.02, 0.04
"""The share of a loss that was gained where anything was learned, and the standard error at which that can be told."""
SURELY = 3.0
"""Standard errors above 0 that are no chance."""
TIMES = 8
"""A constant prediction is learned first; what inputs tell takes some of the models in the box six times as long."""
OF_A_CLASS = 30
"""Samples of a class without which it is not known by anything."""


def knows_more_than_nothing(case: Case) -> Iterator[Verdict]:
    """In the end the loss is below that of the best constant prediction, and below that of shuffled targets."""
    facts = case.newest(LearnedFacts)
    if facts is None:
        if (why := case.blind(LearnedFacts)) is not None:
            yield NotApplicable(why)
        elif case.finished and case.last_step >= LEARNED:
            yield ExperimentRequest(LearnedFacts.experiment)
        return
    if facts.drawn or not facts.calls:
        yield NotApplicable("the model learns from samples of its own" if facts.drawn else "no targets that vary")
        return
    bad = [each for each in facts.calls if each.error < CERTAIN and max(each.gained, each.told) < LEAST + each.error]
    if not bad:
        first = facts.calls[0]
        yield Holds(f"{named(first)} {first.value:.3g}, a constant prediction {first.constant:.3g}")
        return
    if (young := still_learns(case, facts.calls)) is not None:
        yield NotApplicable(f"still learning: {young}")
        return
    last = bad[0]
    yield finding(
        "law.loss.knows_more_than_nothing",
        "info" if len(bad) < len(facts.calls) and all(each.own_way for each in bad) else "warning",
        case.last_step,
        symptom=f"after {case.last_step} steps {named(last)} is {last.value:.4g}; a prediction without inputs has "
        f"{last.constant:.4g}, and with the targets shuffled it is {last.shuffled:.4g}",
        cause="nothing was learned that tells one sample from another: targets that do not belong to the inputs, "
        "updates that do not work, or outputs that do not depend on the inputs",
        remedy="look at inputs and targets of one batch side by side as they go into model and loss; then train on "
        "one batch alone",
        sure=0.7,
        stage="label",
        where=where_of(last),
        evidence=[
            ("share of the loss of a constant prediction that was gained", round(last.gained, 4), f">= {LEAST}"),
            ("rise of the loss with shuffled targets, as a share of that", round(last.told, 4), f">= {LEAST}"),
            ("standard error of these", round(last.error, 4)),
        ],
    )


def still_learns(case: Case, calls: Sequence[Learned] = ()) -> str | None:
    """Why a model that knows nothing yet may be on its way; None where it has come to its end."""
    if still_falls(case):
        return f"the loss falls over the second half of {case.last_step} steps"
    if calls and (told := _tells_a_little(calls)) is not None:
        return told
    rare = [each for each in calls if case.last_step * each.targets < OF_A_CLASS * each.classes]
    if rare:
        return f"{case.last_step} steps of {rare[0].targets} targets, of {rare[0].classes} classes"
    arrived = _arrived(case)
    if case.last_step < TIMES * arrived:
        return f"it took {arrived} of {case.last_step} steps to learn what needs no inputs"
    return None


def _tells_a_little(calls: Sequence[Learned]) -> str | None:
    told, error = fmean(each.told for each in calls), math.hypot(*(each.told_error for each in calls)) / len(calls)
    return (
        f"shuffled targets make the loss {told:.2%} larger, give or take {error:.2%}"
        if 0.0 < SURELY * error < told
        else None
    )


def _arrived(case: Case) -> int:
    """The first step with a loss that is usual in the second half of the run."""
    losses = [(each.step, each.loss) for each in case.watched if math.isfinite(each.loss)]
    later = [loss for step, loss in losses if 2 * step > case.last_step]
    if len(later) < 2:
        return 0
    usual = fmean(later) + 2 * stdev(later)
    return next((step for step, loss in losses if loss <= usual), 0)
