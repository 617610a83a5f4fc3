"""The law of baselines: what was expected is subtracted from what came of a draw."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import BaselineFacts

CLEAR = 0.5
"""Of the way that all weights would go: those of most draws follow."""


def baselines_are_subtracted(case: Case) -> Iterator[Verdict]:
    """What a return does to the weight of a draw, what was expected undoes."""
    facts = case.newest(BaselineFacts)
    if facts is None:
        if (why := case.blind(BaselineFacts)) is not None:
            yield NotApplicable(why)
        return
    if min(abs(facts.by_target), abs(facts.by_prediction)) < CLEAR:
        yield NotApplicable("the weights of draws do not depend on both, a return and what was expected")
        return
    if facts.by_target * facts.by_prediction < 0:
        yield Holds(f"weights follow returns by {facts.by_target:.2g} and expectations by {facts.by_prediction:.2g}")
        return
    yield finding(
        "law.loss.baselines_are_subtracted",
        "warning",
        case.last_step,
        symptom="a higher return and a higher expected return move the weight of what was drawn the same way",
        cause="the expected return is added to the return, in place of being subtracted from it, or has the other sign",
        remedy="weigh the log-probability of an action by (returns - values).detach()",
        sure=0.85,
        stage="loss",
        since_step=1,
        evidence=[
            ("weights follow returns", round(facts.by_target, 2)),
            ("weights follow expected returns", round(facts.by_prediction, 2), "with the other sign"),
        ],
    )
