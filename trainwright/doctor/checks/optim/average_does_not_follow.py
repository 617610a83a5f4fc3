from itertools import pairwise

from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.weights import MAX_UNEXPLAINED, AveragesFacts, CopyFacts, averages_of


@check(stage="update", confidence=0.9)
def average_does_not_follow(run: RunContext, facts: AveragesFacts) -> Results:
    """A moving average of the weights is not an average, because its factors are wrong.

    How it is detected: copies of the weights (modules, dicts, lists of the same shapes) are followed for 16 steps, and
    each change is fitted by a fraction of the distance to the weights plus a growth factor.

    Exceptions: slow weights and target networks, which change only from time to time; a decay that warms up.

    Usual cause: the two factors do not add up to 1, the decay is not between 0 and 1, or decay and its complement are
    swapped.

    Fix: `average.mul_(decay).add_(weights, alpha=1 - decay)` with a decay such as 0.99.
    """
    averages = averages_of(facts)
    if not averages:
        yield NotApplicable("no copy of the weights follows them")
        return
    for copy in averages:
        if all(move.rest < MAX_UNEXPLAINED for move in copy.moves) and (what := _wrong_with(copy)):
            last = copy.moves[-1]
            yield run.finding(
                symptom=f"the averages of the weights of {copy.of} (a {copy.kind}) {what}",
                since_step=copy.moves[0].step,
                evidence=[("fraction of the way at each step", last.share, "0 to 0.5"), ("growth", last.growth, 0.0)],
            )


def _wrong_with(copy: CopyFacts) -> str:
    last, shares = copy.moves[-1], [move.share for move in copy.moves]
    if all(move.rest_alone > 10 * move.rest + 1e-3 for move in copy.moves):
        return f"are multiplied by {1 + last.growth:.4g} at each step beside what they take of the weights"
    if any(move.rest_alone > MAX_UNEXPLAINED for move in copy.moves):
        return ""
    if min(shares) < 0 or max(shares) > 1:
        return f"take {last.share:.4g} of the way to the weights at each step"
    is_every_step = any(after.step - before.step == 1 for before, after in pairwise(copy.moves))
    if min(shares) > 0.5 and is_every_step and not shares[-1] < 0.95 * shares[0]:
        return f"take {last.share:.0%} of the way to the weights at each step, so they average fewer than two steps"
    return ""
