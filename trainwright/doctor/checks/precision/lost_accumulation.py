"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.precision import FormatFacts, SummedFacts
from trainwright.doctor.finding import ExperimentRequest, RemedyTrial
from trainwright.doctor.shared_requests import is_due

TIMES_ROUNDING = 4
"""A few micro-batches lose little more than one rounding does."""


@check(stage="backward", needs=FormatFacts)
def lost_accumulation(run: RunContext) -> Iterator[Result]:
    """Gradients of many micro-batches are summed in 16 bits, where what is small next to the sum is lost.

    Why it matters: the later micro-batches of a step count for less than the first ones.

    How it is detected: the micro-batches of a step are replayed and summed in float32; the sum in 16 bits is four times
    further away than one rounding is.

    Usual cause: weights, and so gradients, in bfloat16 and many micro-batches.

    Looks like: gradient.accumulation_not_normalised, which is wrong in float32, too.

    Fix: weights in float32 with autocast for the arithmetic; or a float32 buffer, `main_grad.add_(p.grad.float())`
    after each backward pass; or fewer and larger micro-batches.

    Sources: trl #2175.
    """
    formats = run.latest(FormatFacts)
    if formats is None or not formats.weights or formats.backwards < 2:
        return
    if is_due(run, SummedFacts):
        yield ExperimentRequest(SummedFacts.experiment)
    for step, facts in run.every(SummedFacts)[-1:]:
        if facts.error > 0 and facts.error >= TIMES_ROUNDING * facts.rounding:
            yield run.finding(
                step,
                symptom=f"adding up {facts.micro_batches} micro-batches puts the gradients {facts.error:.1%} off",
                evidence=[("distance from the float32 sum", facts.error, facts.rounding)],
                trial=RemedyTrial("sum_in_fp32"),
            )
