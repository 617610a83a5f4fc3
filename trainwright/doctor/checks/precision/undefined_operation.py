from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check()
def undefined_operation(run: RunContext) -> Results:
    """An operation turns finite numbers into NaN, because it is not defined for its input.

    How it is detected: the step is replayed operation by operation; the first that makes a NaN has finite inputs
    outside of its domain, or combines infinities of a mask.

    Usual cause: the logarithm or root of a negative number, `acos` beyond 1, a fractional power of a negative base,
    `0 * inf` or `inf - inf` with a mask.

    Fix: clamp the input to where the operation is defined, such as `x.clamp(min=0).sqrt()`; compute a variance by
    `x.var(correction=0)`, not as `E[x*x] - E[x]**2`; use a finite number in masks.
    """
    yield from traced_by(
        run,
        {
            "log_of_negative": Mechanism(
                "{op}{place} is taken of a negative number ({lowest:.4g})", guard="guarded", fix="clamp its input"
            ),
            "sqrt_of_negative": Mechanism(
                "{op}{place} is taken of a negative number ({lowest:.4g})", guard="guarded", fix="clamp its input at 0"
            ),
            "power_of_negative": Mechanism(
                "{op}{place} has a negative base and a fractional power", fix="clamp the base"
            ),
            "out_of_domain": Mechanism(
                "{op}{place} is not defined at {lowest:.4g}..{highest:.4g}", guard="guarded", fix="clamp its input"
            ),
            "zero_times_inf": Mechanism(
                "{op}{place} multiplies 0 by the infinity of a mask",
                guard="finite_mask",
                fix="mask with a finite number",
            ),
            "inf_minus_inf": Mechanism(
                "{op}{place} subtracts infinities from each other", guard="finite_mask", fix="mask with a finite number"
            ),
            "invalid": Mechanism("{op}{place} is not defined for its inputs"),
        },
    )
