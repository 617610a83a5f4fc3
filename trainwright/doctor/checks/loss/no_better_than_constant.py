import math
from statistics import fmean, stdev

from trainwright.doctor import Every, NotApplicable, Results, RunContext, check
from trainwright.doctor.facts.loss import MIN_GAIN, LossFacts, MeasuredLoss, learned_nothing, over_most_steps, where_of
from trainwright.doctor.trend import still_falls

MIN_STEPS = 60  # Steps after which something must have been learned
MIN_ROWS = 4  # Minimum number of measured steps among the last ones
MIN_SAMPLES_OF_A_CLASS = 30  # Minimum number of trained samples per class, on average
LEARNING_TIME_RATIO = 8
"""Steps for learning from inputs / steps for learning the target mean. Some models need a ratio of six."""


@check(names_cause=False, stage="label", confidence=0.7)
def no_better_than_constant(run: RunContext, exams: Every[LossFacts]) -> Results:
    """At the end the model is no better than a prediction that ignores the inputs.

    How it is detected: at the end of a run of at least 60 steps, the loss of the last examined steps is within 2 % of
    that of a constant prediction, the mean of all targets so far. Shuffling the targets of the batch does not raise it
    by 2 % either.

    Exceptions: the loss still falls, or the run had fewer than 30 samples per class. Several models, drawn samples or a
    reversed gradient, where a part of the model should be unable to predict. One of two calls of the same loss
    function, if the model has learned the other one, such as the inner loss of MAML before adaptation.

    Usual cause: targets that do not belong to the inputs, updates without effect, or outputs that ignore the inputs.

    Looks like: optim.lr_too_low, where the loss falls, but too slowly.

    Fix: compare inputs and targets of one batch side by side as they enter model and loss; then train on that batch
    alone, until the loss is near 0.
    """
    facts = over_most_steps(exams)
    if not run.finished or run.last_step < MIN_STEPS:
        return
    if facts.rivals or facts.drawn:
        yield NotApplicable("several models, or samples that the model draws")
        return
    known = [each for each in facts.given if len(each.rows) >= MIN_ROWS and not each.reverses]
    if not known:
        yield NotApplicable("no loss function whose targets vary")
        return
    learned = {(each.op, each.classes) for each in known if not learned_nothing(each)}
    bad = [each for each in known if (each.op, each.classes) not in learned]
    if bad and (why := _still_learns(run, bad)) is not None:
        yield NotApplicable(f"still learning: {why}")
    elif bad:
        last = bad[0]
        value, constant, shuffled = (fmean(column) for column in zip(*last.rows))
        yield run.finding(
            symptom=f"after {run.last_step} steps {last.op} is {value:.4g}; the best constant prediction has "
            f"{constant:.4g}, and with shuffled targets it is {shuffled:.4g}",
            where=where_of(last),
            evidence=[
                ("gain over a constant prediction, as a fraction", round(1 - value / constant, 4), f">= {MIN_GAIN}"),
                (
                    "rise with shuffled targets, as a fraction",
                    round((shuffled - value) / constant, 4),
                    f">= {MIN_GAIN}",
                ),
            ],
        )


def _still_learns(run: RunContext, bad: list[MeasuredLoss]) -> str | None:
    """Returns the reason why the model may begin to learn later; None if there is none."""
    if still_falls(run):
        return f"the loss falls over the second half of {run.last_step} steps"
    rare = [
        each for each in bad if each.classes and run.last_step * each.shape[0] < MIN_SAMPLES_OF_A_CLASS * each.classes
    ]
    if rare:
        return f"only {run.last_step} steps with {rare[0].shape[0]} targets each, for {rare[0].classes} classes"
    losses = [(each.step, each.loss) for each in run.steps if math.isfinite(each.loss)]
    later = [loss for step, loss in losses if 2 * step > run.last_step]
    if len(later) < 2:
        return None
    arrived = next((step for step, loss in losses if loss <= fmean(later) + 2 * stdev(later)), 0)
    if run.last_step < LEARNING_TIME_RATIO * arrived:
        return f"it took {arrived} of {run.last_step} steps to learn the mean of the targets"
    return None
