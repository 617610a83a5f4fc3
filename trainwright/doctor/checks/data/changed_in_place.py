"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.steadiness import SteadinessFacts

REPEATS = 4


@check(stage="input", confidence=0.9, needs=SteadinessFacts)
def changed_in_place(run: RunContext) -> Iterator[Result]:
    """The training data are written to in place.

    How it is detected: version counters of the inputs; and checksums of parts of a larger tensor that come again and
    have other values, which are made of the old ones.

    Exceptions: an input that is no view of a larger tensor is reported only with -v.

    Usual cause: `x *= 2`, `x.mul_()` or a normalisation in place on a batch that is a view of the data set.

    Fix: work out of place (`x = x * 2`), or on `x.clone()`.
    """
    facts = run.latest(SteadinessFacts)
    if facts is None:
        return
    if facts.changed >= REPEATS:
        yield run.finding(
            facts.steps,
            symptom=f"{facts.changed} of {facts.came_again} parts of the data that came again had other values",
            since_step=facts.since_changed,
            evidence=[("parts that had other values when they came again", facts.changed, 0)],
        )
    elif facts.written >= REPEATS:
        is_view = facts.written_views >= REPEATS
        yield run.finding(
            facts.steps,
            symptom=f"in {facts.written} steps the input of the model is written to in place",
            severity="warning" if is_view else "info",
            sure=0.6,
            since_step=facts.since_written,
            evidence=[("steps that wrote to their input", facts.written, 0)],
        )
