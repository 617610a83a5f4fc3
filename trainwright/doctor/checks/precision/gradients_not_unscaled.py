"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.precision import MixedPrecisionFacts


@check(stage="update", confidence=0.9, needs=MixedPrecisionFacts, explains=("precision.scaler_collapse",))
def gradients_not_unscaled(run: RunContext) -> Iterator[Result]:
    """The loss is scaled, and the optimizer steps with the scaled gradients.

    Why it matters: the gradients are up to 65536 times too large. Adam hides that in its moments, but its eps, weight
    decay that is added to the gradient, and clipping no longer have their meaning; SGD diverges. Overflow is not
    skipped.

    How it is detected: backward is called on a loss times a scale, and neither `scaler.unscale_` nor `scaler.step`
    runs, and nothing divides the gradients before `optimizer.step()`, in four steps.

    Usual cause: `optimizer.step()` where `scaler.step(optimizer)` is meant.

    Fix: call `scaler.step(optimizer)` and `scaler.update()` instead of `optimizer.step()`.

    Sources: nerfacc #307, Applio PR 860.
    """
    facts = run.latest(MixedPrecisionFacts)
    if facts is not None and facts.still_scaled:
        yield run.finding(
            run.last_step,
            symptom=f"the optimizer steps with gradients of a loss that is scaled by {facts.scale:g}",
            since_step=1,
            evidence=[("updates with scaled gradients", facts.still_scaled, 0), ("loss scale", facts.scale, 1)],
        )
