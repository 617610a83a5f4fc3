"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.schedule import LearningRateFacts


@check(stage="loop", confidence=0.85, needs=LearningRateFacts)
def overruled(run: RunContext) -> Iterator[Result]:
    """Updates use another learning rate than the scheduler has set.

    How it is detected: the rates of the groups at each update against what the last scheduler to be stepped has set, in
    four updates.

    Exceptions: rates that the loop sets for a time and then leaves to the scheduler are reported only with -v.

    Usual cause: the loop, or another scheduler, writes to `group["lr"]`, too.

    Fix: let one of them set the rate; to combine schedules use `ChainedScheduler` or `SequentialLR`.
    """
    facts = run.latest(LearningRateFacts)
    if facts is None or not any(each.calls for each in facts.schedulers):
        yield NotApplicable("no scheduler is stepped")
        return
    off = [each for each in facts.schedulers if each.calls >= 2 and each.off >= 4]
    if not off:
        yield Passed(f"{sum(each.updates for each in facts.schedulers)} updates")
        return
    first = off[0]
    yield run.finding(
        run.last_step,
        symptom=f"{first.off} of {first.updates} updates had another learning rate than {first.kind} had set: "
        f"{first.seen:.4g} instead of {first.said:.4g}",
        severity="warning" if first.off_in_a_row >= 4 or not first.followed else "info",
        since_step=first.off_since,
        evidence=[("learning rate of the last such update", first.seen, first.said)],
    )
