from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check()
def division_by_zero(run: RunContext) -> Results:
    """A division by exactly 0: 0/0 is NaN, and anything else is infinite.

    How it is detected: the step is replayed operation by operation; the first that makes a value non-finite divides by
    0, or is a mean of an empty tensor or the standard deviation of a single value.

    Usual cause: an empty mask, a constant feature, a batch of one sample, or an eps of 1e-8, which is 0 in float16.

    Looks like: data.empty_sample, where one sample has no content.

    Fix: clamp the divisor: `count.clamp(min=1)` for a count, `x.std() + 1e-6` for a spread.

    Sources: Automodel PR 2468.
    """
    yield from traced_by(
        run,
        {
            "div_by_zero": Mechanism("{op}{place} divides by 0", guard="guarded"),
            "mean_of_empty": Mechanism(
                "{op}{place} is taken of an empty tensor: 0 / 0", fix="skip empty selections: `if mask.any():`"
            ),
            "std_of_one": Mechanism(
                "{op}{place} is taken of a single value: 0 / 0",
                fix="`x.std(correction=0)`, or drop batches of one sample",
            ),
        },
    )
