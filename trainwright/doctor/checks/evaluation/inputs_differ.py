import math

from trainwright.doctor import NotApplicable, Passed, Results, RunContext, Where, check
from trainwright.doctor.facts.evaluation import EvaluationFacts

MIN_MEAN_SHIFT = 1.0
"""Distance between the means in standard deviations. Augmentation shifts them by less."""
MIN_STD_RATIO = 2.0
"""Ratio of the standard deviations. Augmentation changes them by less."""
FAR_MULTIPLE = 5.0
"""Multiple of MIN_MEAN_SHIFT and MIN_STD_RATIO that needs no worse loss."""
LOSS_RATIO = 2.0
"""Loss of evaluation / loss of training."""
MIN_TRAINING_LOSSES = 8


@check(stage="input", confidence=0.75, needs=EvaluationFacts)
def inputs_differ(run: RunContext) -> Results:
    """The inputs of the evaluation are prepared differently from those of training.

    Why it matters: the validation loss is that of other data, and the best checkpoint is chosen by it.

    How it is detected: the means of the inputs are more than one deviation apart, or the deviations differ by a factor
    of 2, and the loss of the evaluation is twice that of training. Without a loss the distance must be 5 times that.

    Exceptions: without a worse loss it is an info: the data may differ on purpose.

    Usual cause: another normalisation or none, other units, or statistics along another axis.

    Looks like: data.unnormalised_input.

    Fix: prepare both by one function, with the statistics of the training data.
    """
    facts = run.measured(EvaluationFacts)
    found = facts.likeness
    if found is None:
        yield NotApplicable("too few rows of floating-point inputs are known of both")
        return
    ratio = max(found.ratio, 1 / max(found.ratio, 1e-9))
    apart = max(found.shift / MIN_MEAN_SHIFT, ratio / MIN_STD_RATIO)
    if apart <= 1:
        yield Passed(f"{found.rows} rows, {found.shift:.2g} deviations apart")
        return
    losses = [each.loss for each in run.steps if each.step <= max(1, facts.after) and math.isfinite(each.loss)][-16:]
    if len(losses) >= MIN_TRAINING_LOSSES and min(losses) > 0.0 and facts.losses:
        is_sure = min(facts.losses) > LOSS_RATIO * sum(losses) / len(losses)
    else:
        is_sure = apart > FAR_MULTIPLE
    yield run.finding(
        max(1, facts.after),
        severity="warning" if is_sure else "info",
        symptom=f"the inputs of the evaluation differ from those of training: the means are {found.shift:.3g} "
        f"deviations apart, and they vary {found.ratio:.3g} times as much",
        where=Where(source=facts.source),
        evidence=[
            ("distance of the means, in deviations of the training inputs", round(found.shift, 3), 0.0),
            ("deviation in the evaluation over that in training", round(found.ratio, 4), 1.0),
        ],
    )
