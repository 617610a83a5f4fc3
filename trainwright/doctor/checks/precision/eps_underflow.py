from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check(points_at="optimizer", stage="update")
def eps_underflow(run: RunContext) -> Results:
    """The eps of the optimizer is 0 in its dtype: 1e-8 is 0 in float16, so Adam divides 0 by 0.

    How it is detected: a replay traces the step operation by operation. All gradients are finite, and the optimizer
    update produces the first non-finite value, with an eps below 3e-8 in float16.

    Usual cause: `model.half()` with the default eps.

    Fix: keep the weights in float32 and use `torch.autocast`; or `torch.optim.Adam(model.parameters(), eps=1e-4)`.

    Sources: Lightning #20619, glide #5.
    """
    cause = "gradients are finite, the update is not: eps={eps:g} is 0 in float16, so the optimizer divides by 0"
    yield from traced_by(run, {"eps_underflow": Mechanism(cause)})
