import math
import statistics
from collections.abc import Sequence

from trainwright.doctor import Measured, Results, RunContext, check
from trainwright.doctor.facts.reference import MIN_STEPS, ReferenceFacts, differ, differences, traits_of

NUM_POINTS = 8  # Number of common steps that are compared, at the beginning and at the end
MIN_DEVIATIONS = 4.0  # In standard deviations of the reference run. Its batches explain smaller ones.


@check(stage="loss", confidence=0.7, names_cause=False)
def course_differs(run: RunContext, reference: ReferenceFacts) -> Results:
    """Losses, gradient norms or learning rates differ from those of the reference run at the same steps.

    How it is detected: the learning rate differs by more than 1 % at a common step. Or the mean loss or gradient norm
    of the first or of the last 8 common steps differs by more than a quarter and more than 4 standard deviations of the
    reference run.

    Usual cause: another initialization, learning rate, loss, batch size or amount of data.

    Looks like: reference.program_differs, which names the difference in the program.

    Fix: first fix what reference.program_differs reports. If it reports nothing, compare the learning rates.
    """
    if (here := traits_of(run)).steps < MIN_STEPS:
        return
    theirs = {each.step: each for each in reference.traits.course}
    common = [(each, theirs[each.step]) for each in here.course if each.step in theirs]
    if len(common) < NUM_POINTS:
        return
    rates = [(one, other) for one, other in common if differ(one.lr, other.lr, 0.01)]
    evidence: list[Measured] = [(f"learning rate at step {one.step}", one.lr, other.lr) for one, other in rates[:1]]
    for part, name in ((common[:NUM_POINTS], "first"), (common[-NUM_POINTS:], "last")):
        losses = _differing_means([one.loss for one, _ in part], [other.loss for _, other in part])
        norms = _differing_means([one.grad_norm for one, _ in part], [other.grad_norm for _, other in part])
        for what, means in (("loss", losses), ("gradient norm", norms)):
            if means is not None:
                evidence.append((f"mean {what} of the {name} {NUM_POINTS} common steps", *means))
    if evidence:
        yield run.finding(symptom=differences(evidence), evidence=evidence)


def _differing_means(here: Sequence[float], there: Sequence[float]) -> tuple[float, float] | None:
    """Returns the two means if they differ by more than the spread of the reference; else None."""
    if not all(map(math.isfinite, (*here, *there))):
        return None
    ours, other = statistics.fmean(here), statistics.fmean(there)
    is_beyond = abs(ours - other) > MIN_DEVIATIONS * statistics.stdev(there)
    return (ours, other) if is_beyond and differ(ours, other) else None
