"""See the function."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.check import NotApplicable, Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.loss import LossFacts, MeasuredLoss
from trainwright.doctor.shared_loss import OVER_CLASSES, where_of

MAX_RATIO, MAX_EXCESS = 1.5, 0.5
"""Of the loss at chance: a first loss over classes is at most this many times it, and this much more."""
MAX_DISTANCE_RATIO = 100.0
"""For distances: outputs of ten times the size of the targets."""
MIN_STEPS, STAYS = 16, 0.9
"""The step at which it is evaluated, and the fraction of the loss at chance that it is below by then."""


@check(names_cause=False, stage="forward", confidence=0.85, needs=LossFacts)
def starts_far_above_chance(run: RunContext) -> Iterator[Result]:
    """The first loss is far above that of a model that knows nothing, and stays there.

    How it is detected: the first value of a loss function against that of outputs of 0. Over classes it may be 1.5
    times as large plus 0.5; a distance may be 100 times as large. A warning if it is still above after 16 steps, else
    an info.

    Exceptions: outputs that are normalized before the loss, whose scale belongs to the loss (margin losses).

    Usual cause: outputs are far too large before anything was learned: unscaled inputs, an unusual initialization, or
    a factor before the loss.

    Looks like: init.too_large, which names the layer.

    Fix: standardize the inputs, use the default initialization, and look for a factor before the loss.
    """
    first = next((facts for _, facts in run.every(LossFacts)), None)
    known = [each for each in (first.given if first else ()) if each.values[0] and each.blank > 0]
    if first is None or not known or first.normalizes:
        yield NotApplicable("no loss function that compares with targets, or its inputs are normalized")
        return
    bad = [each for each in known if _is_far(each)]
    if not bad:
        yield Passed(", ".join(f"{each.op} {each.values[0][0]:.3g}, at chance {each.blank:.3g}" for each in known[:3]))
        return
    if run.last_step < MIN_STEPS and not run.finished:
        return
    worst = max(bad, key=lambda each: (each.op in OVER_CLASSES, each.values[0][0] / each.blank))
    latest = run.latest(LossFacts)
    now = next((c.values[1][-1] for c in (latest or first).given if _is_same(c, worst) and c.values[1]), math.inf)
    stays = not now < STAYS * worst.blank
    yield run.finding(
        1,
        symptom=f"the first {worst.op} is {worst.values[0][0]:.4g}; outputs of 0 have {worst.blank:.4g}",
        severity="warning" if stays and worst.op in OVER_CLASSES else "info",
        since_step=1,
        where=where_of(worst),
        evidence=[(f"first {worst.op}", worst.values[0][0], worst.blank), (f"{worst.op} now", now)],
    )


def _is_far(call: MeasuredLoss) -> bool:
    if call.op in OVER_CLASSES:
        return call.values[0][0] > MAX_RATIO * call.blank + MAX_EXCESS
    constant = call.rows[0][1] if call.rows else 0.0
    return call.values[0][0] > MAX_DISTANCE_RATIO * max(call.blank, constant)


def _is_same(one: MeasuredLoss, other: MeasuredLoss) -> bool:
    return (one.op, one.line, one.module) == (other.op, other.line, other.module)
