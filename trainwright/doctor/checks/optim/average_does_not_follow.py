from itertools import pairwise
from statistics import median

from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.weights import MAX_UNEXPLAINED, AveragesFacts, CopyFacts, averages_of

MAX_SHARE = 0.3  # Maximum fraction that a useful average takes of the weights in each step
MIN_STILL = 0.5  # Median over the moves of the fraction of elements of a 16-bit copy that stay unchanged


@check(stage="update", confidence=0.9, explains=("evaluation.labels_renamed",))
def average_does_not_follow(run: RunContext, facts: AveragesFacts) -> Results:
    """A moving average of the weights (EMA) is not an average: its factors are wrong, or its dtype loses the changes.

    How it is detected: copies of the weights (modules, dicts or lists with the same shapes) are followed for 16 steps.
    Each change is fitted as a fraction of the distance to the weights plus a growth of the copy. A fraction below 0,
    above 1, or above 0.3 in every step is wrong, and so is any growth. Or each update of a 16-bit copy leaves half of
    its elements unchanged.

    Exceptions: slow weights (Lookahead) and target networks, which change now and then; a decay that warms up.

    Usual cause: the two factors do not add up to 1, the decay is not between 0 and 1, or decay and its complement are
    swapped or overwritten; or the average is kept in 16 bits, where a change of less than half of the last digit is
    lost.

    Fix: keep the average in float32: `average.mul_(decay).add_(weights, alpha=1 - decay)` with a decay such as 0.99.

    Sources: d8ahazard/sd_dreambooth_extension PR 1415, AndreasBergmeister/ram#6.
    """
    averages = averages_of(facts)
    if not averages:
        yield NotApplicable("no copy of the weights follows them")
        return
    for copy in averages:
        still = median(move.still for move in copy.moves)
        if copy.dtype and still >= MIN_STILL and all(move.rest > 0.5 for move in copy.moves):
            yield run.finding(
                symptom=f"each update of the average of {copy.of} (a {copy.kind} in {copy.dtype}) leaves {still:.0%} "
                "of its elements unchanged: the change is lost by rounding",
                since_step=copy.moves[0].step,
                evidence=[("fraction of elements that do not move", round(still, 3), "< 0.2")],
            )
        if all(move.rest < MAX_UNEXPLAINED for move in copy.moves) and (what := _wrong_with(copy)):
            last = copy.moves[-1]
            yield run.finding(
                symptom=f"the average of the weights of {copy.of} (a {copy.kind}) {what}",
                since_step=copy.moves[0].step,
                evidence=[
                    ("fraction of the distance in each step", last.share, f"0 to {MAX_SHARE}"),
                    ("growth", last.growth, 0.0),
                ],
            )


def _wrong_with(copy: CopyFacts) -> str:
    last, shares = copy.moves[-1], [move.share for move in copy.moves]
    if all(move.rest_alone > 10 * move.rest + 1e-3 for move in copy.moves):
        return f"is multiplied by {1 + last.growth:.4g} in each step, in addition to its move towards the weights"
    if any(move.rest_alone > MAX_UNEXPLAINED for move in copy.moves):
        return ""
    if min(shares) < 0 or max(shares) > 1:
        return f"moves {last.share:.4g} of the distance to the weights in each step"
    is_every_step = any(after.step - before.step == 1 for before, after in pairwise(copy.moves))
    if min(shares) > MAX_SHARE and is_every_step and not shares[-1] < 0.95 * shares[0]:
        steps = 1 / last.share
        return (
            f"moves {last.share:.0%} of the distance to the weights in each step: it averages about {steps:.0f} steps"
        )
    return ""
