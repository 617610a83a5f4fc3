"""See the function."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.schedule import LearningRateFacts
from trainwright.doctor.finding import RemedyTrial

LAMBDA_FLOOR, LAMBDA_TOP, MIN_CHANGES = 0.05, 0.5, 12
"""Of a rate without a class that says so: fractions of the peak that it falls to and ends below, and changes of it."""


@check(points_at="schedule", stage="loop", confidence=0.95, needs=LearningRateFacts)
def cosine_climbs(run: RunContext) -> Iterator[Result]:
    """A cosine schedule is stepped beyond its end, and the learning rate climbs back.

    Why it matters: after twice `T_max` it is at its peak again; the run ends with a high rate and does not converge.

    How it is detected: `CosineAnnealingLR` with `last_epoch > T_max` whose rate rises; or, at the end of a run, a rate
    of a lambda or of the loop that fell once to below 5 % of its peak and rises smoothly since, to less than half of
    it.

    Exceptions: schedules whose class is a cycle (warm restarts, one-cycle, cyclic), and rates that rise more than once.

    Usual cause: `T_max` is shorter than the run, or counts in another unit.

    Fix: `CosineAnnealingLR(optimizer, T_max=total_steps)`, in calls of `scheduler.step()`; stop stepping it at its end.

    Sources: CodefyUI#205, HALOs#33.
    """
    facts = run.latest(LearningRateFacts)
    rates = [lr for _, lr in facts.lrs] if facts is not None else []
    if facts is None or len(rates) < 3:
        yield NotApplicable("the learning rate is constant")
        return
    parts = [part for each in facts.schedulers for part in each.parts]
    past = [p for p in parts if p.kind == "CosineAnnealingLR" and p.T_max is not None and p.last_epoch > p.T_max]
    is_free = all(part.kind == "LambdaLR" for part in parts)
    if rates[-1] > rates[-2] and (past or (run.finished and is_free and _is_half_a_wave(rates, facts.peak))):
        length = past[0].T_max if past else None
        yield run.finding(
            run.last_step,
            symptom=f"the learning rate rises again: {rates[-2]:.3g} -> {rates[-1]:.3g}"
            + (f"; the cosine ends after {length:g} calls of scheduler.step()" if past else ""),
            sure=None if past else 0.7,
            since_step=int(facts.lrs[-1][0]) if past else None,
            evidence=[("calls of scheduler.step()", past[0].last_epoch if past else None, f"<= {length}")],
            trial=RemedyTrial("another_rate", {"lr": max(min(rates), 0.01 * facts.peak)}),
        )
    else:
        yield Passed(f"{len(rates)} changes of the learning rate")


def _is_half_a_wave(rates: list[float], peak: float) -> bool:
    """Whether the rate fell to a floor once, and rises from it slowly at first, then faster."""
    low = min(range(len(rates)), key=rates.__getitem__)
    down, up = rates[max(0, low - 6) : low + 1], rates[low:]
    rises = [b - a for a, b in pairwise(up)]
    is_smooth = len(rises) >= 6 and len(down) >= 6 and all(b > a > 0 for a, b in pairwise(rises[:6]))
    falls = all(a > b for a, b in pairwise(down)) and all(each > 0 for each in rises)
    return (
        is_smooth
        and falls
        and len(rates) >= MIN_CHANGES
        and rates[low] <= LAMBDA_FLOOR * peak
        and up[-1] < LAMBDA_TOP * peak
    )
