from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.precision import MixedPrecisionFacts

MIN_ROUNDING_RATIO = 4
"""Error of the sum / error of one rounding. A few micro-batches lose little more than one rounding."""


@check(stage="backward", since_step=1)
def lost_accumulation(run: RunContext, facts: MixedPrecisionFacts) -> Results:
    """Gradients of many micro-batches are summed in 16 bits, so values that are small compared with the sum are lost.

    How it is detected: a sample of the gradients of the first steps is also summed in float32. The error of the sum in
    16 bits is at least four times that of one rounding.

    Usual cause: weights, and so gradients, are in bfloat16, and there are many micro-batches.

    Looks like: gradient.accumulation_not_normalised, which is wrong in float32, too.

    Fix: weights in float32 and computation under `torch.autocast`; or a float32 buffer:
    `main_grad.add_(p.grad.float()); p.grad = None` after each backward pass; or fewer and larger micro-batches.

    Sources: trl #2175.
    """
    if not facts.sum_error or facts.sum_error < MIN_ROUNDING_RATIO * facts.sum_rounding:
        return
    yield run.finding(
        symptom=f"summing {facts.micro_batches} micro-batches in 16 bits makes their sum {facts.sum_error:.1%} wrong",
        evidence=[("distance from the float32 sum", facts.sum_error, facts.sum_rounding)],
    )
