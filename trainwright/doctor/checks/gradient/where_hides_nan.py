from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check()
def where_hides_nan(run: RunContext) -> Results:
    """`torch.where` or `masked_fill` discards a bad value, but not its gradient: 0 times infinity is NaN.

    How it is detected: the step is replayed operation by operation; the first non-finite gradient belongs to a value
    that `torch.where` or `masked_fill` has discarded in the forward pass.

    Usual cause: `torch.where(x > 0, x.log(), 0)`: both branches are differentiated.

    Looks like: gradient.infinite_derivative, where no value is discarded.

    Fix: make the input safe before the operation: `torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), 0.0)`.

    Sources: pytorch/pytorch #68425, #52248.
    """
    cause = "{hidden_by} discards what {op}{place} gives there, but not its derivative: 0 times infinity"
    yield from traced_by(run, {"where_branch_backward": Mechanism(cause, guard="guarded")})
