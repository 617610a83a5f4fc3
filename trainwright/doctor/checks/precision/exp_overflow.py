"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result
from trainwright.doctor.context import RunContext
from trainwright.doctor.shared_nonfinite import CONSEQUENCES, Way, traced_by, traced_check


@traced_check(explains=(*CONSEQUENCES, "precision.overflow", "precision.undefined_operation"))
def exp_overflow(run: RunContext) -> Iterator[Result]:
    """The exponential of a large number is infinite: above 88.7 in float32, above 11.09 in float16.

    How it is detected: the step is replayed operation by operation; the first that makes a value non-finite is an
    exponential of a finite number.

    Usual cause: a log-variance, a temperature or an importance ratio that grows.

    Looks like: precision.overflow, by a product or a sum.

    Fix: `logvar.clamp(-10, 10)` before `exp`, or `F.softplus`; `torch.logsumexp` and `F.softmax`, which subtract the
    maximum first.

    Sources: WorldModels #14.
    """
    cause = "{op}{place} of {highest:.4g} is more than {dtype} can represent"
    yield from traced_by(run, {"exp_overflow": Way(cause, guard="guarded")})
