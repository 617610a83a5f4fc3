"""See the function."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.evaluation import EvaluationFacts

SHIFT, SCALE = 1.0, 2.0
"""Standard deviations between the means, and a factor between the deviations: augmentation changes both by less."""
FAR = 5.0
"""Deviations, and a factor, that no other part of the same data is away."""
WORSE, ENOUGH = 2.0, 8
"""Times the losses of training that the evaluation has; losses of training to compare with."""


@check(stage="input", confidence=0.75, needs=EvaluationFacts)
def inputs_differ(run: RunContext) -> Iterator[Result]:
    """The inputs of the evaluation are prepared differently from those of training.

    Why it matters: the validation loss is that of other data, and the best checkpoint is chosen by it.

    How it is detected: mean and deviation of the inputs in training and in evaluations. The means are more than one
    deviation apart, or the deviations differ by a factor of 2, and the loss of the
    evaluation is twice that of training (or the distance is above 5). Or training has whole numbers only.

    Exceptions: without a worse loss it is an info: the data may differ on purpose.

    Usual cause: another normalisation or none, other units, statistics along another axis, or a cast to integers.

    Looks like: data.unnormalised_input.

    Fix: prepare both by one function, with the statistics of the training data.
    """
    facts = run.latest(EvaluationFacts)
    likeness = facts.likeness if facts else None
    if facts is None or likeness is None:
        yield NotApplicable("too few rows of floating-point inputs are known of both")
        return
    far = max(likeness.shift / FAR, likeness.ratio / FAR, 1 / FAR / max(likeness.ratio, 1e-9))
    if not (likeness.is_cut or likeness.shift > SHIFT or not 1 / SCALE < likeness.ratio < SCALE):
        yield Passed(f"{likeness.rows} rows, {likeness.shift:.2g} deviations apart")
        return
    suffers = _suffers(run, facts)
    is_sure = far > 1 or likeness.is_cut if suffers is None else suffers
    yield run.finding(
        max(1, facts.after),
        severity="warning" if is_sure else "info",
        symptom="the inputs of training are whole numbers, and those of the evaluation are not"
        if likeness.is_cut
        else f"the inputs of the evaluation differ from those of training: the means are {likeness.shift:.3g} "
        f"deviations apart, and they vary {likeness.ratio:.3g} times as much",
        evidence=[
            ("distance of the means, in deviations of the training inputs", round(likeness.shift, 3), 0.0),
            ("deviation in the evaluation over that in training", round(likeness.ratio, 4), 1.0),
        ],
    )


def _suffers(run: RunContext, facts: EvaluationFacts) -> bool | None:
    """Whether the evaluation is clearly worse than training is at the time; None where that is unknown."""
    losses = [each.loss for each in run.steps if each.step <= max(1, facts.after) and math.isfinite(each.loss)][-16:]
    if len(losses) < ENOUGH or min(losses) <= 0.0 or not facts.losses:
        return None
    return min(facts.losses) > WORSE * sum(losses) / len(losses)
