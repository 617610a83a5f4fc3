from trainwright.doctor import Every, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import CONSEQUENCES_OF_WRONG_ARGUMENTS, LossFacts, sign_of

MIN_STEPS = 3


@check(
    stage="loss",
    severity="critical",
    confidence=0.95,
    since_step=1,
    explains=(
        "loss.no_better_than_constant",
        "loss.nll_without_log_softmax",
        "model.mixes_samples",
        *CONSEQUENCES_OF_WRONG_ARGUMENTS,
    ),
)
def softmax_over_samples(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The softmax before the loss runs over the samples of the batch or over positions instead of over the classes.

    Why it matters: the samples of a batch compete for each class, while the classes of a sample do not compete. The
    loss stays high, and predictions depend on the other samples.

    How it is detected: in three or more steps, the axis of the softmax is not that of the classes. This axis is known
    for `nll_loss`, `cross_entropy` and `ctc_loss`, for a choice of one log-probability in each row, and for targets
    whose rows sum to 1.

    Exceptions: contrastive losses (scores of pairs (N, N), or a softmax over each axis), weights of a router or of a
    pooling, and probabilities that are transposed afterwards.

    Usual cause: `dim=0`, which is also the default for three axes; or `dim=1` where the classes are the last axis.

    Looks like: loss.softmax_before_cross_entropy, where the softmax runs over the classes and is superfluous.

    Fix: `F.cross_entropy(logits, target)` without a softmax, or `F.log_softmax(logits, dim=-1)` where the classes are
    the last axis.

    Sources: perone/euclidesdb#2, MicrosoftDocs/pytorchfundamentals PR 21,
    DeepReinforcementLearning/DeepReinforcementLearningInAction#32.
    """
    sign = sign_of(exams, "wrong_axis")
    if sign is not None and (sign.steps >= MIN_STEPS or len(exams) >= MIN_STEPS):
        yield run.finding(
            where=Where(op=sign.op.strip("_"), source=sign.line),
            evidence=[("examined steps with a softmax over another axis than the classes", sign.steps, 0)],
        )
