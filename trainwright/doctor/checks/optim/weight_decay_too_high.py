from trainwright.doctor import Every, RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.weights import UpdateFacts

MIN_STEPS = 24
MIN_DECAY_PER_STEP = 5e-3
"""Fraction by which a decoupled decay shrinks every weight per step. 0.005 halves them in 140 steps."""
USUAL_DECAY, USUAL_COUPLED_DECAY = 0.1, 1e-3
"""Decay up to which a large one comes from the learning rate (see optim.lr_too_high), or from a tiny gradient."""
MIN_GRADIENT_RATIO = 0.5  # Norm of a coupled decay / norm of the gradient


@check(stage="update", confidence=0.85)
def weight_decay_too_high(run: RunContext, facts: UpdateFacts, exams: Every[UpdateFacts]) -> Results:
    """Weight decay shrinks the weights faster than the gradients can make them grow.

    Why it matters: the model forgets what it learns and predicts the average label.

    How it is detected: the loss has fallen by less than a quarter in 24 steps or more. AdamW, with a weight_decay above
    0.1, takes more than 0.5 % (lr times weight_decay) off all weights in each step; or the decay of SGD or Adam, with a
    weight_decay above 0.001, is more than half of the gradient in an examined step.

    Usual cause: a value for SGD used with AdamW, or the other way round; a misplaced decimal point.

    Looks like: optim.lr_too_high, where the decay is usual and the learning rate is not; a strong decay under which the
    loss falls (grokking), which is healthy.

    Fix: `weight_decay` of 0.01 to 0.1 for AdamW, 1e-4 to 5e-4 for SGD, and 0 for biases, normalizations and embeddings.

    Sources: Loshchilov and Hutter 2019.
    """
    losses = [each.loss for each in run.steps]
    decay, usual = max(facts.weight_decay, default=0.0), USUAL_DECAY if facts.decoupled else USUAL_COUPLED_DECAY
    if facts.optimizers != 1 or len(losses) < MIN_STEPS or decay <= usual:
        return
    ratio = max(_decay_ratio(each) for _, each in exams)  # the last one is small where the weights have become small
    now, first = sum(losses[-4:]) / 4, losses[0]
    if ratio <= (MIN_DECAY_PER_STEP if facts.decoupled else MIN_GRADIENT_RATIO) or not now > first - 0.25 * abs(first):
        return
    how = f"takes {ratio:.1%} off all weights in each step" if facts.decoupled else f"is {ratio:.2g} times the gradient"
    yield run.finding(
        symptom=f"a weight decay of {decay:g} {how}, and the loss goes from {first:.4g} to {now:.4g} in "
        f"{len(losses)} steps",
        evidence=[("norm of the weights", facts.weight_norm, exams[0][1].weight_norm)],
        trial=RemedyTrial("weight_decay", {"to": 0.01 if facts.decoupled else 1e-4}),
    )


def _decay_ratio(facts: UpdateFacts) -> float:
    """Returns the fraction that a decoupled decay takes off the weights, or the norm of a coupled one / gradient."""
    decay, rate = max(facts.weight_decay, default=0.0), max(facts.lr, default=0.0)
    return decay * rate if facts.decoupled else decay * facts.weight_norm / max(facts.grad_norm, 1e-30)
