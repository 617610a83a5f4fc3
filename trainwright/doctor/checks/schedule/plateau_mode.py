"""See the function."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.schedule import LearningRateFacts, SchedulerFacts
from trainwright.doctor.finding import RemedyTrial


@check(
    points_at="schedule",
    stage="loop",
    confidence=0.9,
    needs=LearningRateFacts,
    explains=("optim.lr_too_low", "schedule.ends_too_early"),
)
def plateau_mode(run: RunContext) -> Iterator[Result]:
    """ReduceLROnPlateau cuts the learning rate while its metric improves.

    Why it matters: the better the training goes, the sooner the learning rate is near 0.

    How it is detected: the metric moves in one direction while the training loss falls, and the rate was cut.

    Usual cause: `mode="max"` for a loss, or `mode="min"`, the default, for an accuracy.

    Looks like: a true plateau, where the metric has not improved for longer than the patience.

    Fix: `ReduceLROnPlateau(optimizer, mode="min")` for a loss, `"max"` for an accuracy.
    """
    facts = run.latest(LearningRateFacts)
    for each in facts.schedulers if facts is not None else ():
        right = _right_mode(each)
        first = each.metrics[0].lr if each.metrics else 0.0
        if facts is None or not right or not (facts.lrs[-1][1] < first or each.metrics[-1].lr < first):
            continue
        values = [row.value for row in each.metrics]
        yield run.finding(
            run.last_step,
            symptom=f"the learning rate is cut while the metric goes {values[0]:.3g} -> {values[-1]:.3g}",
            remedy=f'mode="{right}"',
            evidence=[("mode", each.parts[0].mode, right)],
            trial=RemedyTrial("another_rate", {"lr": facts.peak}),
        )
        return


def _right_mode(each: SchedulerFacts) -> str:
    """ "" where it is the one that it has, or is not known."""
    values, losses = [row.value for row in each.metrics], [row.loss for row in each.metrics]
    if each.kind != "ReduceLROnPlateau" or len(values) < 3 or not losses[-1] < losses[0]:
        return ""
    mode = each.parts[0].mode
    if mode == "max" and _falls(values):
        return "min"
    is_share = min(values) >= 0 and (max(values) <= 1 or 10 < max(values) <= 100)
    is_score = is_share and not math.isclose(values[0], losses[0], rel_tol=0.3)
    return "max" if mode == "min" and is_score and _falls([-value for value in values]) else ""


def _falls(values: list[float]) -> bool:
    """Whether values fall in most steps, and in all."""
    return values[-1] < values[0] and sum(b < a for a, b in pairwise(values)) >= 0.7 * (len(values) - 1)
