from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check()
def smoothing_over_masked_class(run: RunContext) -> Results:
    """Label smoothing gives weight to a class whose logit is masked with -inf, so the cross-entropy is infinite.

    How it is detected: the step is replayed operation by operation; a smoothed loss sums a log_softmax with -inf.

    Usual cause: classes that are masked with -inf, and `label_smoothing` above 0.

    Looks like: precision.overflow, where the gradients are bad as well. Here the gradients are finite.

    Fix: mask with a finite number such as -1e4, or distribute the smoothing over the allowed classes only.
    """
    cause = "label smoothing gives a part of the target to classes whose logit is -inf"
    yield from traced_by(run, {"inf_logit_smoothing": Mechanism(cause, guard="finite_mask")})
