from trainwright.doctor import Every, NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.loss import LossFacts, MeasuredLoss, over_most_steps, where_of

MIN_STEPS = 6  # Minimum number of examined steps
STEPS_COMPARED = 3  # Number of first and of last steps whose losses are compared
MAX_RELATIVE_DIFFERENCE = 0.1  # Relative difference between a loss and its value for some of the samples
UNMEASURED_LOSSES = ("log_softmax", "squared error", "absolute error")
"""Functions whose value is not measured or is no loss. The total loss is compared instead."""


@check(
    stage="loss",
    severity="critical",
    confidence=0.95,
    explains=("data.*", "gradient.exploding", "model.init_too_large", "optim.lr_too_high", "optim.lr_too_low"),
    since_step=1,
)
def wrong_sign(run: RunContext, exams: Every[LossFacts]) -> Results:
    """The loss is maximized: its sign is wrong.

    How it is detected: in every examined step the argument of `backward()` falls where a loss that is bounded below
    (cross entropy, mean squared error, ...) rises. Either this argument is exactly the negative of that loss, or the
    last values of that loss are all above its first values.

    Exceptions: several models or optimizers, of which one may work against the other; samples drawn by the model, as in
    policy gradients.

    Usual cause: a minus before the loss, or `maximize=True` with a loss that should fall.

    Looks like: optim.lr_too_high, where the loss rises although its sign is correct.

    Fix: remove the minus, or `maximize=True`.
    """
    facts = over_most_steps(exams)
    known = [each for _, one in exams for each in one.given if each.wants]
    if not known:
        yield NotApplicable("no loss function that is bounded below")
        return
    if facts.rivals or facts.drawn:
        yield NotApplicable("several models, or samples that the model draws")
        return
    uphill = 1 if facts.maximizes else -1
    if any(each.wants != uphill for each in known if each.op != "entropy"):
        return
    call = next((each for each in reversed(known) if _is_negated(run, each, uphill) or _rises(run, each, uphill)), None)
    if call is None:
        return
    name = "negative log-likelihood" if call.op == "log_softmax" else call.op
    early, late = _course(run, call, uphill)
    yield run.finding(
        symptom=f"every update makes {name} larger: {early[0]:.4g} in the first step, {late[-1]:.4g} now",
        cause=f"{name} is maximized: "
        + ("maximize=True" if facts.maximizes else "its sign is inverted before backward()"),
        where=where_of(call),
        evidence=[(f"{name} in the first and last steps", [early[0], late[-1]], "falls")],
    )


def _is_negated(run: RunContext, call: MeasuredLoss, uphill: int) -> bool:
    """Returns True if the total loss is the negative of this loss and no gradient is changed by hand."""
    if (
        uphill > 0
        or not call.values[0]
        or call.op in UNMEASURED_LOSSES
        or any("edited" in each.values for each in run.steps)
    ):
        return False
    first = run.steps[0].loss if run.steps else 0.0
    return first < 0 and abs(first + call.values[0][0]) < MAX_RELATIVE_DIFFERENCE * abs(first)


def _rises(run: RunContext, call: MeasuredLoss, uphill: int) -> bool:
    early, late = _course(run, call, uphill)
    return len(early) >= MIN_STEPS and min(late[-STEPS_COMPARED:]) > max(early[:STEPS_COMPARED])


def _course(run: RunContext, call: MeasuredLoss, uphill: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the first and the last values of the loss that should fall."""
    if call.values[0] and call.op not in UNMEASURED_LOSSES:
        return call.values
    losses = tuple(uphill * each.loss for each in run.steps)
    return losses[:8], losses[-8:]
