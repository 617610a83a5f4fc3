"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.nonfinite import TraceFacts
from trainwright.doctor.shared_nonfinite import CONSEQUENCES, Way, divides_by_eps, finding_of, traces


@check(stage="update", severity="critical", confidence=0.97, needs=TraceFacts, explains=CONSEQUENCES)
def eps_underflow(run: RunContext) -> Iterator[Result]:
    """The eps of the optimizer is 0 in its dtype: 1e-8 is 0 in float16, so Adam divides 0 by 0.

    How it is detected: the step is replayed operation by operation; every gradient is finite, and the first non-finite
    value is made by the update, with an eps below 3e-8 in float16.

    Usual cause: `model.half()` with the default eps.

    Fix: weights in float32 and `torch.autocast` for the arithmetic; else `eps=1e-4`.

    Sources: lightning #20619, glide #5.
    """
    for found in traces(run):
        first = found[2]
        if first.kind == "op" and divides_by_eps(first):
            cause = (
                "gradients are finite, the update is not: eps={eps:g} is 0 in float16, so the optimizer divides by 0"
            )
            yield finding_of(run, found, Way(cause, guard="larger_eps"))
            return
