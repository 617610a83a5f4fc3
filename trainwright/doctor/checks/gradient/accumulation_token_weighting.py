from statistics import variance

from trainwright.doctor import Every, ExperimentRequest, Results, RunContext, check
from trainwright.doctor.facts.loss import AccumulationFacts

MIN_COUNT_RATIO = 1.5  # Largest count / smallest count
MAX_EXAMINATIONS = 4  # Examinations of accumulated steps that are requested. The counts of one may be equal
MIN_RELATIVE_ERROR = 0.25  # Relative distance of a micro-batch's weight from its fraction of the targets


@check(points_at=("op:cross_entropy", "op:nll_loss", "backward"), stage="loss", confidence=0.85)
def accumulation_token_weighting(run: RunContext, exams: Every[AccumulationFacts]) -> Results:
    """Micro-batches with unequal numbers of targets have equal weights, so targets of short ones count too much.

    How it is detected: a replayed step shows over how many elements each micro-batch takes its mean. The largest number
    is at least 1.5 times the smallest, and the numbers vary more than random masking explains.

    Exceptions: a single step in which only the last micro-batch has a different number of targets.

    Usual cause: each micro-batch takes the mean over its own tokens, and the means are averaged.

    Looks like: gradient.accumulation_not_normalised, which is off by a constant factor.

    Fix: `tokens = sum(int((t != -100).sum()) for t in targets)` over all micro-batches of the step, then
    `(F.cross_entropy(logits, t, reduction="sum") / tokens).backward()` for each.

    Sources: huggingface/transformers#34191, huggingface/transformers#35203.
    """
    found: list[tuple[int, list[float]]] = []
    is_counted = False
    for step, facts in exams:
        counts, weights = [each for each in facts.counts if each], [each for each in facts.weights if each]
        whole = len(counts) == len(weights) == facts.backwards and facts.is_plain
        is_counted |= whole and len(counts) > 1
        if whole and len(counts) > 1 and max(weights) < 1.1 * min(weights) and _are_uneven(counts):
            found.append((step, counts))
    if len(found) < 2 and not any(len({*counts[:-1]}) > 1 for _, counts in found):
        if is_counted and len(exams) < MAX_EXAMINATIONS:
            yield ExperimentRequest("accumulation")
        return
    step, counts = found[-1]
    yield run.finding(
        step,
        symptom=f"some targets count {max(counts) / min(counts):.2g} times as much as others in the same step",
        since_step=found[0][0],
        evidence=[("targets of the micro-batches", counts, "equal, or weighted by their number")],
    )


def _are_uneven(counts: list[float]) -> bool:
    """Returns True if counts differ by more than with random masking, where the variance is below the mean."""
    mean = sum(counts) / len(counts)
    spread = (sum((each / mean - 1) ** 2 for each in counts) / len(counts)) ** 0.5
    return max(counts) >= MIN_COUNT_RATIO * min(counts) and variance(counts) > mean and spread > MIN_RELATIVE_ERROR
