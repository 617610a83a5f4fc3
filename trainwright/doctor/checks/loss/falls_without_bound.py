import math
from itertools import pairwise
from statistics import fmean

from trainwright.doctor import NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.loss import LossFacts, over_most_steps

MIN_STEPS = 32
MIN_DEPTH_RATIO = 20.0  # Distance of the final loss below 0 / largest absolute loss in the first eighth of the run


@check(
    names_cause=False,
    points_at="backward",
    stage="loss",
    confidence=0.8,
    explains=("loss.no_better_than_constant",),
    since_step=1,
)
def falls_without_bound(run: RunContext) -> Results:
    """The loss falls faster and faster, far below 0.

    How it is detected: over at least 32 steps, the mean losses of the four quarters of the run fall, each time by more
    than before. The last loss is negative, and at least 20 times as large as any loss of the first eighth.

    Exceptions: several models or optimizers; samples drawn by the model; density likelihoods, whose fall slows down.

    Usual cause: the sign of a term is wrong (a penalty or a divergence is subtracted instead of added), `nll_loss`
    without `log_softmax`, or a distance that is maximized without a margin.

    Looks like: loss.wrong_sign, where a loss function is maximized.

    Fix: write the loss as a sum of terms to minimize. Bound a distance to maximize: `F.relu(margin - distance)`.
    """
    exams = run.every(LossFacts)
    if exams and (facts := over_most_steps(exams)) and (facts.rivals or facts.drawn):
        yield NotApplicable("several models, or samples that the model draws")
        return
    losses = [each.loss for each in run.steps if math.isfinite(each.loss)]
    if len(losses) < MIN_STEPS:
        return
    size = len(losses) // 4
    parts = [fmean(losses[n * size : (n + 1) * size]) for n in range(4)]
    falls = [before - after for before, after in pairwise(parts)]
    least = -MIN_DEPTH_RATIO * max(map(abs, losses[: len(losses) // 8]))
    if losses[-1] >= least or not all(later > before > 0 for before, later in pairwise(falls)):
        return
    yield run.finding(
        symptom=f"the loss falls faster and faster: from {losses[0]:.4g} to {losses[-1]:.4g}",
        evidence=[("mean loss of four parts of the run", parts, f"above {least:.4g}")],
    )
