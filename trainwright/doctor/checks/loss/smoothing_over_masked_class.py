from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check()
def smoothing_over_masked_class(run: RunContext) -> Results:
    """Cross-entropy with label smoothing meets a logit of -inf: smoothing gives that class some weight, so the loss is
    inf.

    How it is detected: the step is replayed operation by operation; a log_softmax with -inf is summed by a smoothed
    loss.

    Usual cause: classes that are masked with -inf, and `label_smoothing` above 0.

    Looks like: precision.overflow, where the gradients are bad as well. Here the gradients are finite.

    Fix: mask with a finite number such as -1e4, or spread the smoothing over the allowed classes only.
    """
    cause = "label smoothing gives a part of the target to classes whose logit is -inf"
    yield from traced_by(run, {"inf_logit_smoothing": Mechanism(cause, guard="finite_mask")})
