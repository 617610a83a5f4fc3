import math
from collections.abc import Sequence
from itertools import pairwise

from trainwright.doctor import RemedyTrial, Results, RunContext, check
from trainwright.doctor.facts.schedule import LearningRateFacts, PlateauMetric, SchedulerFacts


@check(points_at=("scheduler", "schedule"), stage="loop", confidence=0.9, explains=("optim.lr_too_low",))
def plateau_mode(run: RunContext, facts: LearningRateFacts) -> Results:
    """ReduceLROnPlateau cuts the learning rate while its metric improves.

    Why it matters: the better the training goes, the sooner the learning rate is near 0.

    How it is detected: in at least three calls up to the first cut, the training loss falls, and a metric with
    `mode="max"` falls or a metric between 0 and 1, or 0 and 100, with `mode="min"` rises, in 70 % of the calls.

    Usual cause: `mode="max"` for a loss, or `mode="min"`, the default, for an accuracy.

    Looks like: a true plateau, where the metric has not improved for longer than the patience.

    Fix: `ReduceLROnPlateau(optimizer, mode="min")` for a loss, `"max"` for an accuracy.
    """
    for each in facts.schedulers:
        until_cut = _until_cut(each)
        right = _right_mode(each.parts[0].mode, until_cut)
        if not right:
            continue
        values = [row.value for row in until_cut]
        yield run.finding(
            symptom=f"the learning rate of ReduceLROnPlateau is cut while its metric improves: {values[0]:.3g} -> "
            f"{values[-1]:.3g}",
            remedy=f'mode="{right}"',
            evidence=[("mode", each.parts[0].mode, right)],
            trial=RemedyTrial("another_rate", {"lr": facts.peak}),
        )


def _until_cut(each: SchedulerFacts) -> Sequence[PlateauMetric]:
    """Returns the metrics up to the first cut of the learning rate. Later ones stagnate because of it."""
    cut = next((n for n, row in enumerate(each.metrics) if row.lr < each.metrics[0].lr), None)
    return () if each.kind != "ReduceLROnPlateau" or cut is None else each.metrics[: max(cut + 1, 3)]


def _right_mode(mode: str, rows: Sequence[PlateauMetric]) -> str:
    """Returns the other mode if that is the correct one; "" if the current one is correct, or it is unknown."""
    values = [row.value for row in rows]
    if len(rows) < 3 or not rows[-1].loss < rows[0].loss:
        return ""
    if mode == "max" and _falls(values):
        return "min"
    is_share = min(values) >= 0 and (max(values) <= 1 or 10 < max(values) <= 100)
    is_score = is_share and not math.isclose(values[0], rows[0].loss, rel_tol=0.3)
    return "max" if mode == "min" and is_score and _falls([-value for value in values]) else ""


def _falls(values: Sequence[float]) -> bool:
    """Returns True if values fall in most steps, and overall."""
    return values[-1] < values[0] and sum(b < a for a, b in pairwise(values)) >= 0.7 * (len(values) - 1)
