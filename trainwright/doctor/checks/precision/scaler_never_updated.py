"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.calls import ScalerFacts


@check(stage="update", confidence=0.9, needs=ScalerFacts)
def scaler_never_updated(run: RunContext) -> Iterator[Result]:
    """`scaler.update()` is never called, so the loss scale neither falls after an overflow nor grows.

    How it is detected: four calls of `scaler.step` and none of `scaler.update`.

    Usual cause: the call was left out.

    Fix: call `scaler.update()` once after `scaler.step(optimizer)`.
    """
    facts = run.latest(ScalerFacts)
    if facts is not None and facts.steps >= 4 and not facts.updates:
        yield run.finding(run.last_step, evidence=[("calls of scaler.update()", 0, facts.steps)])
