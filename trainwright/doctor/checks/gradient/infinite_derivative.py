from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check()
def infinite_derivative(run: RunContext) -> Results:
    """A function is evaluated at the edge of its domain: its value is finite, its derivative is infinite, and the
    gradient is NaN.

    Why it matters: the loss shows nothing until the weights are NaN.

    How it is detected: the step is replayed operation by operation; the first non-finite value is made in the backward
    pass of a root or norm at 0, or of `acos`, `asin` or `atanh` at 1.

    Usual cause: the distance of two equal vectors, a standard deviation of constant values, the angle of a vector with
    itself. `clamp(-1, 1)` does not help: its edge is where the derivative is infinite.

    Looks like: gradient.where_hides_nan, where the bad value is also discarded.

    Fix: `torch.linalg.vector_norm`, whose gradient at 0 is 0; `torch.sqrt(x + 1e-8)`; `x.clamp(-1 + 1e-6, 1 - 1e-6)`
    before `acos`.

    Sources: pytorch/pytorch #2421, #8069, #187297, arcface-pytorch #68.
    """
    yield from traced_by(
        run,
        {
            "sqrt_at_zero_backward": Mechanism(
                "{op}{place} is taken of 0: the value is 0, its derivative is infinite, and 0 times that is NaN",
                guard="guarded",
                fix="add an eps under the root, or use torch.linalg.vector_norm, whose gradient at 0 is 0",
            ),
            "domain_edge_backward": Mechanism(
                "{op}{place} is finite at the edge of its domain, but its derivative is infinite",
                guard="guarded",
                fix="clamp its input to the inside of the domain",
            ),
        },
    )
