"""The law of the sign of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, finding
from trainwright.doctor.law import Holds, Verdict
from trainwright.doctor.vitals.facts import VitalsFacts

NEVER, SINCE = 16, 8
"""Updates at a rate of 0 that are no warm-up from 0, and no hand-over from one schedule to the next."""
WASTED, CUT = 0.2, 16
"""Share of all updates: so many at a rate of 0 at the end are no tail in which running statistics settle. Nor are so
many updates after a rate that no decay had brought down.
"""
HIGH = 0.5
"""Of the highest rate: no decay has brought it down."""
DECAYED = 0.01
"""Of the highest rate: from less than this a decay comes to 0."""


def rates_are_positive(case: Case) -> Iterator[Verdict]:
    """No update is made at a learning rate below 0, and the rate does not fall to 0 from one step to the next."""
    facts = case.newest(VitalsFacts)
    if facts is None or not facts.steps:
        return
    num_at_0 = facts.steps - facts.at_0_since + 1 if facts.at_0_since else 0
    if facts.lowest_rate < 0.0:
        yield _below_0(facts)
    elif num_at_0 >= NEVER and facts.at_0_since == 1:
        yield _at_0(facts, f"the learning rate was 0 in all of {num_at_0} updates")
    elif num_at_0 >= _too_many(facts) and facts.rate_before_0 > DECAYED * facts.highest_rate:
        fell = f"the learning rate fell from {facts.rate_before_0:.3g} to 0 in step {facts.at_0_since}"
        yield _at_0(facts, f"{fell}, and {num_at_0} updates changed nothing")
    else:
        yield Holds(f"{facts.steps} steps")


def _too_many(facts: VitalsFacts) -> float:
    """Updates at a rate of 0 at the end that are no tail."""
    is_cut = facts.rate_before_0 >= HIGH * facts.highest_rate
    return min(max(SINCE, WASTED * facts.steps), CUT if is_cut else math.inf)


def _below_0(facts: VitalsFacts) -> Finding:
    return finding(
        "law.vitals.rates_are_positive",
        "warning",
        facts.steps,
        symptom=f"the learning rate is {facts.lowest_rate:.3g} in step {facts.lowest_at}: the update goes uphill",
        cause="a factor of the schedule is below 0: a cosine without its 1, a decay that goes on past the end",
        remedy="print the rate of every step of a schedule before it is used; max(0.0, ...) around it",
        sure=0.95,
        stage="update",
        since_step=facts.lowest_at,
        evidence=[("lowest learning rate", facts.lowest_rate, ">= 0")],
    )


def _at_0(facts: VitalsFacts, symptom: str) -> Finding:
    return finding(
        "law.vitals.rates_are_positive",
        "warning",
        facts.steps,
        symptom=symptom,
        cause="the loop or a schedule sets it to 0: a counter at its end, an integer division, a group that is missed",
        remedy="print the rate of every step before the run; end the loop where the rate ends",
        sure=0.85,
        stage="update",
        since_step=facts.at_0_since,
        evidence=[("learning rate", 0.0, facts.rate_before_0 or "above 0")],
    )
