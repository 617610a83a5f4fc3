from trainwright.doctor import NotApplicable, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.schedule import LearningRateFacts

MIN_CALLS = 4
MAX_RATIO = 2.0  # Maximum ratio between the factor and the base learning rate
MAX_BASE_LR = 0.05  # Above this base learning rate, a correct factor may be close to it by chance


@check(
    points_at=("scheduler", "schedule"),
    stage="update",
    severity="critical",
    confidence=0.9,
    explains=("optim.lr_too_low",),
    since_step=1,
)
def factor_is_rate(run: RunContext, facts: LearningRateFacts) -> Results:
    """The function of a `LambdaLR` returns a learning rate instead of a factor, so it is multiplied twice.

    How it is detected: the base learning rate is below 0.05, the highest factor so far (learning rate over
    `initial_lr`) is within a factor of 2 of it, and the learning rate is not rising.

    Usual cause: `LambdaLR(optimizer, lambda step: lr * decay(step))`, or another function that returns learning rates.

    Looks like: a warm-up, whose factor rises; optim.lr_too_low.

    Fix: return a factor that begins at 1, `lambda step: decay(step)`, or create the optimizer with `lr=1.0`.

    Sources: lhoyer/MIC#60, pytorch/pytorch#78917.
    """
    of_lambda = [e for e in facts.schedulers if "LambdaLR" in [p.kind for p in e.parts]]
    if not of_lambda:
        yield NotApplicable("there is no LambdaLR")
        return
    rates = [lr for _, lr in facts.lrs]
    factor = facts.peak / facts.base if facts.base else 1.0
    is_rate = facts.base < MAX_BASE_LR and facts.base / MAX_RATIO < factor < MAX_RATIO * facts.base
    if not is_rate or len(run.steps) < MIN_CALLS or rates[-1] > rates[0]:
        return
    yield run.finding(
        symptom=f"the optimizer was made with a learning rate of {facts.base:.3g}, and the schedule reduces "
        f"it to {facts.peak:.3g}: its factor of {factor:.3g} is a learning rate",
        evidence=[("highest learning rate", facts.peak, facts.base)],
        trial=RemedyTrial("another_rate", {"lr": facts.base}),
    )
