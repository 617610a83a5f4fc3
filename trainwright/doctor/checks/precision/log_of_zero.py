from trainwright.doctor import Results, RunContext
from trainwright.doctor.nonfinite import Mechanism, traced_by, traced_check


@traced_check()
def log_of_zero(run: RunContext) -> Results:
    """The logarithm of exactly 0 is -inf, and makes the loss or its gradient non-finite.

    How it is detected: the step is replayed operation by operation. The first one that makes a value non-finite is a
    logarithm whose input is 0, or a loss that contains a logit of -inf.

    Usual cause: a softmax or sigmoid has rounded a probability to 0, or the target is a class that is masked with -inf.

    Looks like: gradient.where_hides_nan, where the loss is finite and only the gradient is not.

    Fix: `F.log_softmax`, `F.cross_entropy` or `F.logsigmoid` instead of the logarithm of a softmax or sigmoid;
    `torch.log(x + 1e-8)` elsewhere; a finite number such as -1e4 in masks.

    Sources: apex #358, vamb #12, focal-loss-keras #17.
    """
    yield from traced_by(
        run,
        {
            "log_of_zero": Mechanism("{op}{place} is taken of 0", guard="guarded"),
            "inf_at_target": Mechanism(
                "the target is a class whose logit is masked with -inf{place}",
                guard="finite_mask",
                fix="do not mask targets, or mask with a finite number",
            ),
            "inf_in_loss": Mechanism(
                "{op}{place} adds up the infinity of a mask",
                guard="finite_mask",
                fix="mask with a finite number, such as -1e4",
            ),
        },
    )
