import math

from trainwright.doctor import Results, RunContext
from trainwright.doctor.facts.precision import SeenNonfinite, TraceFacts
from trainwright.doctor.nonfinite import Mechanism, skipped_by_scaler, traced_at, traced_by, traced_check


@traced_check()
def overflow(run: RunContext) -> Results:
    """An operation turns finite numbers into infinity: results are larger than the dtype can hold, even in float32.

    How it is detected: the step is replayed operation by operation. The first one that makes a value non-finite has
    finite inputs and gives infinity. Or every gradient is finite and only their norm is not.

    Usual cause: an exponential of more than 88.7 (a log-variance, a temperature, an importance ratio), a product of
    many factors, a sum instead of a mean, a learning rate that is too high.

    Looks like: precision.fp16_overflow, where the same step is finite in float32.

    Fix: `logvar.clamp(-10, 10)` before `exp`; `torch.logsumexp` and `F.softmax`, which subtract the maximum first;
    normalize or clamp the input of the operation.

    Sources: WorldModels #14.
    """
    found = [
        *traced_by(
            run,
            {
                "overflow": Mechanism("{op}{place} gives more than {dtype} can represent (inputs up to {largest:.4g})"),
                "exp_overflow": Mechanism(
                    "{op}{place} of {highest:.4g} is more than {dtype} can represent", guard="guarded"
                ),
                "inf_in_softmax": Mechanism("an input of {op}{place} is +inf: inf / inf"),
            },
        )
    ]
    yield from found
    for step, seen in run.every(SeenNonfinite) if not found else ():
        trace = traced_at(run, step)
        is_known = isinstance(trace, TraceFacts) and not trace.first and not trace.finite_without_scale
        if not is_known or not seen.bad or seen.inputs or seen.num_gradients or skipped_by_scaler(run, step):
            continue
        if isinstance(trace, TraceFacts) and trace.losses and all(map(math.isfinite, trace.losses)):
            yield run.finding(
                step,
                symptom=f"the gradient norm of step {step} is not finite",
                cause="every gradient is finite, but the sum of their squares is not",
                sure=0.6,
                stage="backward",
                evidence=[("non-finite gradients", 0, 0)],
            )
