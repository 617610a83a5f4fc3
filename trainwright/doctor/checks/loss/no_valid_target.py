from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check()
def no_valid_target(run: RunContext) -> Results:
    """All targets of a batch are ignored: the loss is a mean over nothing, 0/0.

    How it is detected: the step is replayed operation by operation; the first NaN comes from a cross-entropy without a
    single target other than `ignore_index`. The gradients are exactly 0.

    Usual cause: a prompt that is cut before its answer, or a micro-batch of padding.

    Looks like: other NaN losses, where the gradients are NaN as well.

    Fix: with `valid = int((target != -100).sum())`: `F.cross_entropy(logits, target, reduction="sum") / max(1, valid)`;
    do not count such a batch in the logged mean.

    Sources: pytorch/pytorch #70348, #116349.
    """
    cause = "every target is ignored: {op} is a mean over nothing, 0 / 0"
    yield from traced_by(run, {"no_valid_target": Mechanism(cause, guard="valid_targets")})
