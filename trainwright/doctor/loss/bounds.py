"""The law of losses that fall without end."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import LargerOutputsFacts

FASTER = 1000.0
"""Between how much farther a linear function falls for outputs a hundred times as large, 100, and a square, 1e4."""


def loss_has_a_bound(case: Case) -> Iterator[Verdict]:
    """The loss does not fall like a square, or faster, where outputs become larger and larger."""
    facts = case.newest(LargerOutputsFacts)
    if facts is None:
        if (why := case.blind(LargerOutputsFacts)) is not None:
            yield NotApplicable(why)
        return
    bad = next((row for row in (facts.larger, facts.turned) if _falls_without_end(row)), None)
    if bad is None:
        yield Holds(f"{facts.larger[0]:.4g}, and {facts.larger[-1]:.4g} for outputs {facts.times[-1]:g} times as large")
        return
    yield finding(
        "law.loss.loss_has_a_bound",
        "warning",
        case.last_step,
        symptom=f"the loss falls without end where outputs grow: {bad[1]:.4g} with outputs {facts.times[1]:g} times as "
        f"large, {bad[2]:.4g} with {facts.times[2]:g} times, {bad[3]:.4g} with {facts.times[3]:g} times",
        cause="the square or the exponential of an output has the wrong sign: a penalty or a divergence is taken off "
        "where it should be added",
        remedy="write the loss as a sum of what is to become small, each with a factor above 0",
        sure=0.85,
        stage="loss",
        since_step=1,
        evidence=[(f"loss with outputs {facts.times[-1]:g} times as large", bad[-1], f">= {bad[0]:.6g}")],
    )


def _falls_without_end(losses: tuple[float, ...]) -> bool:
    """Whether it falls between the last two sizes of outputs by far more than between the two before."""
    own, large, larger, largest = losses
    if not (math.isfinite(own) and math.isfinite(large) and larger < min(own, large)):
        return False
    return largest == -math.inf or larger - largest > FASTER * (large - larger)
