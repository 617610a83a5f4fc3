from trainwright.doctor import ExperimentRequest, Results, RunContext, Where, check
from trainwright.doctor.facts.loss import LossFacts, TermFacts, TermsFacts

MAX_RATIO = 1000.0  # Ratio of the gradients of two terms. Above it, the smaller one has practically no effect.
MAX_STEP = 8  # The last step that counts. Later, a term may have no gradient because it has been learned.
MIN_STEPS = 2  # Minimum number of steps with the imbalance
TARGET_LOSS_SUFFIXES = (
    "_loss", "cross_entropy", "_with_logits", "of pow", "of square", "of abs", "of gather", "of getitem",
)  # fmt: skip
"""Name endings of terms that compare with targets: loss functions, and losses written by hand."""


@check(
    stage="loss",
    confidence=0.9,
    explains=("gradient.*", "optim.lr_too_high", "optim.lr_too_low"),
)
def term_dominates(run: RunContext) -> Results:
    """One term of the loss has a gradient over a thousand times as large as another, which is not learned.

    How it is detected: the gradients of the terms with respect to the parameters that all terms reach are compared in
    replays of two of the first 8 steps.

    Exceptions: a term with a weight below 0.5, which is small on purpose; a term without targets, because a penalty or
    a divergence may be 0 at the start; a term that another one of the same function and weight outweighs (the layers
    of a style loss).

    Usual cause: a weight, or a sum instead of a mean, makes one term far larger. A clipped or adaptive update leaves no
    room for the other.

    Fix: choose weights such that the gradients of both terms have a similar size.
    """
    several = [(step, facts) for step, facts in run.every(LossFacts) if facts.terms > 1 and step <= MAX_STEP]
    seen = [(step, facts) for step, facts in run.every(TermsFacts) if step <= MAX_STEP]
    if several and len(seen) < MIN_STEPS and several[-1][0] == run.last_step:
        yield ExperimentRequest(TermsFacts.experiment, several[-1][0])
    pairs = [pair for _, facts in seen if (pair := _unbalanced(facts.terms)) is not None]
    if len(pairs) < MIN_STEPS or len(pairs) < len(seen):
        return
    large, small = pairs[-1]
    ratio = large.shared / small.shared
    other = f"another {small.name}" if small.name == large.name else small.name
    yield run.finding(
        seen[-1][0],
        symptom=f"the gradient of {large.name} is {ratio:.0f} times that of {other} in weights of both",
        remedy=f"multiply the weight of {large.name} by {1 / ratio:.2g}, so that both gradients have the same size",
        where=Where(op=large.name),
        evidence=[
            (f"gradient norm of {large.name}", large.shared, small.shared),
            ("ratio", round(ratio, 1), f"< {MAX_RATIO:.0f}"),
            ("ratio of their weights", abs(large.weight / small.weight)),
        ],
    )


def _unbalanced(terms: tuple[TermFacts, ...]) -> tuple[TermFacts, TermFacts] | None:
    """Returns the largest term and the smallest one with targets and a weight of at least 0.5; None if balanced."""
    large = max(terms, key=lambda term: term.shared)
    others = [t for t in terms if t is not large and abs(t.own) >= 0.5 and t.shared > 0]
    by_size = sorted((t for t in others if t.name.endswith(TARGET_LOSS_SUFFIXES)), key=lambda term: term.shared)
    largest = {(each.name, each.own): each for each in by_size}  # of the same function and weight
    small = min(largest.values(), key=lambda term: term.shared, default=None)
    return (large, small) if small and large.shared > MAX_RATIO * small.shared else None
