"""Checks of the learning-rate schedule: whether it is stepped in the unit it was made for, and ends with the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, Measured, OldCheck, RemedyTrial, Severity, finding
from trainwright.runlog.json_values import Facts

LOW = 1e-3
"""Share of the highest learning rate below which next to nothing is learned."""
FLOOR, HIGH_FLOOR, HALF_A_WAVE = 0.05, 0.25, 0.5
"""Of the highest rate: what a cosine may have for its floor, what it may have where it does not come back to half of
the peak, and that half: a wave on purpose comes to it."""


def counted_in_the_wrong_unit(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """A schedule that is made for one unit (epochs, steps) and stepped in another ends too early, or never.

    It is stepped after every micro-batch; or with every optimizer step while by its own numbers it ends before one
    epoch does; or the learning rate falls below a thousandth of its peak in the first tenth of the run; or its length
    is that of the run in steps and it is stepped far less often. A schedule that counts steps on purpose lasts longer
    than one epoch, and a warm-up is low before its peak and not after.
    """
    facts = case.facts("schedule")
    for scheduler in facts.get("schedulers", ()):
        found = _micro_batches(case, facts, scheduler) or _spent_in_an_epoch(case, facts, scheduler)
        if found is not None:
            yield found
            return
    if (found := _spent_in_a_tenth(case, facts) or _never_reached(case, facts)) is not None:
        yield found


def _micro_batches(case: Case, facts: Facts, scheduler: Facts) -> Finding | None:
    whole = _whole(scheduler)
    if not whole or any(calls < 2 or calls != backwards or run > 1 for calls, backwards, run in whole):
        return None
    times = whole[-1][0]
    return _mismatch(
        case,
        facts,
        symptom=f"the schedule advances {times} times for each optimizer step",
        cause=f"scheduler.step() is called after each of the {times} micro-batches of a step, so it ends {times} times "
        "too early if it was made for optimizer steps",
        remedy="call scheduler.step() only after optimizer.step()",
        sure=0.9,
        evidence=[("scheduler steps for each optimizer step", times, 1), ("micro-batches for each step", times, None)],
    )


def _spent_in_an_epoch(case: Case, facts: Facts, scheduler: Facts) -> Finding | None:
    whole, length = _whole(scheduler), facts.get("length")
    has_fallen = len(facts["lrs"]) > 1 and facts["lrs"][-1][1] < facts["peak"]
    if not whole or length is None or not has_fallen or any(calls != 1 for calls, _, _ in whole):
        return None
    worth = min((_worth(part) for part in scheduler["parts"]), default=math.inf)
    per_epoch = length / max(1, whole[-1][1])
    if worth >= per_epoch:
        return None
    name = scheduler["parts"][0]["class"]
    return _mismatch(
        case,
        facts,
        symptom=f"{name} has cut the learning rate from {facts['peak']:.3g} to {facts['lrs'][-1][1]:.3g} within "
        f"{facts['lrs'][-1][0]} steps and will end before the first epoch does",
        cause="a schedule that counts epochs is stepped after every batch",
        remedy="call scheduler.step() once after each epoch, or give it its lengths in steps",
        sure=0.9,
        evidence=[("sum of its factors, in steps at the first learning rate", round(worth, 1), f">= {per_epoch:g}")],
    )


def _worth(part: Facts) -> float:
    """The sum of all factors that a decaying schedule will ever give, in steps at the first learning rate."""
    gamma = part.get("gamma", 1.0)
    if not 0 <= gamma < 0.999:
        return math.inf
    if part["class"] == "StepLR":
        return float(part["step_size"] / (1 - gamma))
    if part["class"] == "ExponentialLR":
        return float(1 / (1 - gamma))
    milestones = part.get("milestones")
    is_low = part["class"] == "MultiStepLR" and milestones and gamma ** len(milestones) <= 0.1
    return 4.0 * milestones[-1] if is_low and milestones else math.inf  # legal in the last three quarters of one epoch


def _spent_in_a_tenth(case: Case, facts: Facts) -> Finding | None:
    gone, steps = facts.get("exhausted"), facts.get("steps", 0)
    if gone is None or steps < 10 * gone or steps < 20:
        return None
    return _mismatch(
        case,
        facts,
        symptom=f"the learning rate is below a thousandth of its peak since step {gone} of {steps}",
        cause="the schedule counts in another unit than it is stepped by: epochs and batches, or samples and steps",
        remedy="make the schedule's length that of the run, in calls of scheduler.step()",
        sure=0.85,
        severity="critical",
        evidence=[("share of the run with a learning rate", round(gone / steps, 3), 1.0)],
    )


def _never_reached(case: Case, facts: Facts) -> Finding | None:
    """Made for the steps of this run to within a tenth, and stepped once for many of them."""
    for scheduler in facts.get("schedulers", ()) if case.finished else ():
        part, steps, calls = scheduler["parts"][0], facts["steps"], scheduler["calls"]
        length = part.get("total_steps") or part.get("T_max") or part.get("total_iters") or 0
        if 1 < calls <= steps / 4 and 0.9 * steps <= length <= 1.1 * steps + 1:
            return _mismatch(
                case,
                facts,
                symptom=f"the run ends {calls} steps into a schedule of {length:g}",
                cause="a schedule that counts optimizer steps is stepped once for each epoch",
                remedy="call scheduler.step() after every optimizer.step()",
                sure=0.85,
                evidence=[("scheduler steps", calls, length)],
            )
    return None


def _mismatch(
    case: Case,
    facts: Facts,
    *,
    symptom: str,
    cause: str,
    remedy: str,
    sure: float,
    evidence: Sequence[Measured],
    severity: Severity | None = None,
) -> Finding:
    """``severity`` None: critical once the learning rate is exhausted, else a warning."""
    return finding(
        "sched.unit_mismatch",
        severity or ("warning" if facts.get("exhausted") is None else "critical"),
        case.last_step,
        symptom=symptom,
        cause=cause,
        remedy=remedy,
        sure=sure,
        evidence=evidence,
        trial=RemedyTrial("another_rate", {"lr": facts["peak"]}),
        explains=("opt.lr_too_low", "sched.cosine_climbs"),
    )


def stepped_for_each_process(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The same number of scheduler steps in a row follows each optimizer step, as if each process counted for all.

    Steps after each micro-batch are not in a row, and chained schedulers are several objects.
    """
    facts = case.facts("schedule")
    for scheduler in facts.get("schedulers", ()):
        whole = _whole(scheduler)
        times = whole[-1][0] if whole else 0
        if len(whole) < 2 or times < 2 or any(calls != times or run != times for calls, _, run in whole):
            continue
        yield finding(
            "sched.world_size_scaled",
            "warning",
            case.last_step,
            symptom=f"the schedule advances {times} times after each optimizer step",
            cause="a scheduler that steps once for each process is used with a length in steps of one process, "
            "or it is stepped in two places",
            remedy=f"call scheduler.step() once for an optimizer step, or make its lengths {times} times as long",
            sure=0.95,
            evidence=[("scheduler steps in a row after each optimizer step", times, 1)],
            trial=RemedyTrial("another_rate", {"lr": facts["peak"]}),
            explains=("sched.unit_mismatch", "opt.lr_too_low"),
        )


def _whole(scheduler: Facts) -> list[list[int]]:
    """The windows between two optimizer steps: ``[scheduler steps, backward passes, most scheduler steps in a row]``.

    The first window is left out where calls came before the first record.
    """
    windows: list[list[int]] = scheduler["windows"]
    if not windows:
        return []
    return windows if scheduler["calls"] > sum(w[0] for w in windows) + windows[-1][0] else windows[1:]


def cosine_climbs(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """A cosine schedule that is stepped past its end climbs back to its peak.

    Declared restarts (warm restarts, one-cycle, cyclic) are known by their class. One written as a lambda, or set by
    the loop itself, counts only while it climbs as it fell: slowly out of a flat minimum. The loop's own, or one with a
    high floor, counts only where it ends below half of its peak: a whole wave may be meant.
    """
    facts = case.facts("schedule")
    lrs = facts.get("lrs", [])
    if len(lrs) < 3 or not lrs[-1][1] > lrs[-2][1]:
        return
    parts = [part for scheduler in facts["schedulers"] for part in scheduler["parts"]]
    past = [p for p in parts if p["class"] == "CosineAnnealingLR" and p["last_epoch"] > p.get("T_max", math.inf)]
    is_of_lambdas = bool(parts) and all(part["class"] == "LambdaLR" for part in parts)
    is_low = lrs[-1][1] < HALF_A_WAVE * facts["peak"]
    may_be = not past and case.finished and (is_of_lambdas or (is_low and not parts))
    by_hand = (
        may_be
        and _mirrored(lrs, facts["peak"], HIGH_FLOOR if is_low else FLOOR)
        and not _comes_again(_whole_course(case) or lrs)
    )
    if past or by_hand:
        length = past[0]["T_max"] if past else None
        yield finding(
            "sched.cosine_climbs",
            "warning",
            case.last_step,
            symptom=f"the learning rate rises again: {lrs[-2][1]:.3g} -> {lrs[-1][1]:.3g}",
            cause=f"the cosine ends after {length:g} scheduler steps and the run does not"
            if length
            else "the cosine is evaluated beyond its end",
            remedy="make T_max the number of scheduler steps of the whole run, or stop stepping it there",
            sure=0.95 if past else 0.7,
            since_step=int(lrs[-1][0]) if past else None,
            evidence=[("scheduler steps", past[0]["last_epoch"] if past else None, f"<= {length}")],
            trial=RemedyTrial("another_rate", {"lr": max(min(lr for _, lr in lrs), 0.01 * facts["peak"])}),
        )


def _whole_course(case: Case) -> list[list[float]]:
    """The changes of the rate over all steps that are known; of a schedule only the last are."""
    rates = [[each.step, each.lr] for each in case.watched]
    return [each for before, each in zip([[0, -1.0], *rates], rates) if each[1] != before[1]]


def _comes_again(lrs: list[list[float]]) -> bool:
    """Whether the rate falls out of a peak more than once: a cycle of cosines on purpose."""
    values = [lr for _, lr in lrs]
    peaks = [b for a, b, c in zip(values, values[1:], values[2:]) if a < b >= c and b > 0.5 * max(values)]
    return len(peaks) > (lrs[0][0] <= 1 and values[0] < values[1])  # the first is the end of a warm-up


def _mirrored(lrs: list[list[float]], peak: float, highest: float) -> bool:
    """Whether the last values rise out of their minimum as they fell into it: slowly at first, then faster.

    The minimum may be as high as ``highest``, relative to the peak.
    """
    values = [lr for _, lr in lrs]
    top = values.index(peak) if peak in values else 0  # a warm-up lies before it
    low = min(range(top, len(values)), key=values.__getitem__)
    up, down = values[low + 1 : low + 7], values[max(0, low - 6) : low][::-1]
    floor = values[low]
    if len(up) < 6 or len(down) < 6 or floor > highest * peak:
        return False
    rises = [b - a for a, b in zip([floor, *up], up)]
    speeds_up = all(b > a > 0 for a, b in pairwise(rises))
    return speeds_up and all(math.isclose(a - floor, b - floor, rel_tol=0.5) for a, b in zip(up[1:], down[1:]))


def never_stepped(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """A scheduler exists and is never stepped.

    With a warm-up from 0 the learning rate stays 0, which shows in the second step: one that is stepped has risen by
    then. Without a warm-up it is reported only at the end of the run.
    """
    facts = case.facts("schedule")
    if not facts or any(scheduler["calls"] for scheduler in facts["schedulers"]):
        return
    parts = [part for scheduler in facts["schedulers"] for part in scheduler["parts"]]
    stands_still = facts["attached"] and facts["zero_steps"] == facts["steps"] >= 2
    unused = (
        case.finished
        and bool(parts)
        and len(facts["lrs"]) == 1
        and facts["epochs"] >= 2
        and parts[0]["class"] != "ReduceLROnPlateau"
    )
    if not stands_still and not unused:
        return
    base = max((lr for part in parts for lr in part.get("base_lrs", ())), default=None)
    yield finding(
        "sched.never_stepped",
        "critical" if stands_still else "warning",
        case.last_step,
        symptom="the learning rate is 0 in every step" if stands_still else "the schedule never advances",
        cause="a scheduler was made and scheduler.step() is never called",
        remedy="call scheduler.step() after each optimizer.step()",
        sure=0.95,
        since_step=1,
        evidence=[("scheduler steps", 0, facts["steps"]), ("learning rate", facts["lrs"][-1][1], base)],
        trial=RemedyTrial("another_rate", {"lr": base or 1e-3}),
        explains=("opt.*", "grad.*", "init.*", "sched.unit_mismatch"),
    )


def plateau_the_wrong_way(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """ReduceLROnPlateau cuts the learning rate while its metric improves: its ``mode`` is the wrong one.

    The metric moves in one direction all the way while the training loss falls. A metric that is stuck, or gets worse
    while the training loss falls (overfitting), moves differently.
    """
    facts = case.facts("schedule")
    for scheduler in facts.get("schedulers", ()):
        part, rows = scheduler["parts"][0], scheduler["metrics"]
        if part["class"] != "ReduceLROnPlateau" or len(rows) < 3:
            continue
        first, last = rows[0], rows[-1]
        values, losses = [row[1] for row in rows], [row[2] for row in rows]
        was_cut = facts["lrs"][-1][1] < first[3] or last[3] < first[3]
        learns = losses[-1] < losses[0]
        like_a_loss = _falls(values) and part.get("mode") == "max"
        like_a_score = _falls([-v for v in values]) and part.get("mode") == "min" and _is_no_loss(values, losses)
        if not was_cut or not learns or not (like_a_loss or like_a_score):
            continue
        right = "min" if like_a_loss else "max"
        yield finding(
            "sched.plateau_mode",
            "warning",
            case.last_step,
            symptom=f"the learning rate is cut while the metric goes {values[0]:.3g} -> {values[-1]:.3g}",
            cause=f"ReduceLROnPlateau waits for a {part['mode']}imum of a metric that is better when it is "
            + ("low" if like_a_loss else "high"),
            remedy=f'mode="{right}"',
            sure=0.9,
            evidence=[("mode", part["mode"], right), ("training loss meanwhile", [losses[0], losses[-1]], "rising")],
            trial=RemedyTrial("another_rate", {"lr": facts["peak"]}),
            explains=("opt.lr_too_low",),
        )


def _falls(values: list[float]) -> bool:
    """Whether values fall in most steps, and in all."""
    downs = sum(b < a for a, b in pairwise(values))
    return values[-1] < values[0] and downs >= 0.7 * (len(values) - 1)


def _is_no_loss(values: list[float], losses: list[float]) -> bool:
    """Whether values are a share between 0 and 1 (or 100) that does not start where the training loss did."""
    top = max(values)
    is_share = min(values) >= 0 and (top <= 1 or 10 < top <= 100)
    return is_share and not math.isclose(values[0], losses[0], rel_tol=0.3)


NAMES: tuple[OldCheck, ...] = (
    counted_in_the_wrong_unit,
    stepped_for_each_process,
    cosine_climbs,
    never_stepped,
    plateau_the_wrong_way,
)
