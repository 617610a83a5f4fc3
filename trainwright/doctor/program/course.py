"""The laws of the course of a whole run: it makes steps, and its learning rate goes up and down as rates do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.runlog.json_values import Facts

LONG = 48
"""Steps of a run that is no trial of a few."""
WASTED = 0.25
"""Of the updates: schedules that end at 0 make one in fifty at less than a thousandth of their highest rate."""
RISE, LATE = 1.9, 0.95
"""What a rate that rises in proportion to the steps gains in the second half of a run; where its end begins."""
FALLEN, FEW = 0.5, 8
"""Of the first losses: what is left of them where the rate was of use all the same; losses that are averaged."""
ABOVE = 1.5
"""Times the rate that the optimizer was made with."""
BELOW, BEYOND, STRAIGHT, EVEN = 0.5, 2.0, 16, 0.01
"""Of the optimizer's own rate: where a warm-up begins, and where it is past its top; rates on a straight line, and how
far its rises may differ, relative to the least."""
TO_A_PEAK = ("OneCycleLR", "CyclicLR", "ExponentialLR", "MultiplicativeLR")
"""Schedules that are told where to rise to."""


def steps_are_made(case: Case) -> Iterator[Verdict]:
    """A loop that is watched makes a step."""
    if case.watched:
        yield Holds(f"{len(case.watched)} steps are known")
        return
    unfinished: Facts = case.facts("unfinished")
    if not case.finished or not unfinished or unfinished["error"] is not None:
        return
    if unfinished["events"]:
        yield NotApplicable("a step was begun, or one that cannot be seen")
        return
    yield finding(
        "law.program.steps_are_made",
        "warning",
        1,
        symptom="the watch was left without a step: no model was called, and no optimizer stepped",
        cause="the loop makes no round (a range or a loader that is empty), or runs elsewhere, with other objects than "
        "the watch was given",
        remedy="print the number of epochs and len(loader); watch the objects that the loop uses, in its thread",
        sure=0.8,
        stage="loop",
        evidence=[("steps", 0, ">= 1")],
        explains=("loop.unseen",),
    )


def rate_has_its_course(case: Case) -> Iterator[Verdict]:
    """The learning rate does not fall to nothing long before the end of a run, and does not rise until its end."""
    facts: Facts = case.facts("schedule")
    rates = [(each.step, each.lr) for each in case.watched if each.lr > 0.0]
    if not case.finished or not facts or not rates:
        return
    if facts["steps"] < LONG:
        yield NotApplicable(f"a run of {facts['steps']} steps")
        return
    steps, gone, peak = facts["steps"], facts["exhausted"], facts["peak"]
    half = next((lr for step, lr in rates if 2 * step >= steps), peak)
    if gone is not None and steps - gone > WASTED * steps:
        yield finding(
            "law.program.rate_has_its_course",
            "warning",
            steps,
            symptom=f"the last {steps - gone} of {steps} updates were made at less than a thousandth of the highest "
            f"learning rate, {peak:.3g}",
            cause="the rate decays too fast: a factor that is applied too often, or a schedule for a shorter run",
            remedy="print the rate of every epoch before the run; make the schedule as long as the run",
            sure=0.75,
            stage="update",
            since_step=gone,
            evidence=[("share of updates that change nothing", round(1 - gone / steps, 3), f"<= {WASTED}")],
        )
    elif facts["peak_step"] > LATE * steps and peak > RISE * half:
        yield finding(
            "law.program.rate_has_its_course",
            "info" if _has_learned(case) and not _passes_its_base(case, facts) else "warning",
            steps,
            symptom=f"the learning rate rises until the end of the run: {half:.3g} half-way, {peak:.3g} in step "
            f"{facts['peak_step']} of {steps}",
            cause="a warm-up that never ends, by its condition or its length, or a decay whose sign is turned",
            remedy="print the rate of every epoch before the run; end the warm-up in its first tenth",
            sure=0.7,
            stage="update",
            evidence=[("highest rate over that half-way", round(peak / half, 3), f"<= {RISE}")],
        )
    elif facts["peak"] == min(lr for _, lr in rates):
        yield NotApplicable("the learning rate is constant")
    else:
        yield Holds(f"{steps} updates at {min(lr for _, lr in rates):.3g} to {peak:.3g}")


def _has_learned(case: Case) -> bool:
    """Whether the loss was halved on the way: a stage of warm-up, or a range test, which ends where the loss rises."""
    losses = [each.loss for each in case.watched]
    parts = [sum(losses[at : at + FEW]) / FEW for at in range(0, len(losses) - FEW + 1, FEW)]
    return bool(parts) and min(parts) < FALLEN * parts[0]


def _passes_its_base(case: Case, facts: Facts) -> bool:
    """Whether a schedule rises in a straight line from far below the optimizer's own rate, and far beyond it: a warm-up
    whose top is not held. A range of rates is tried up to the optimizer's own, or in equal factors.
    """
    base: float = facts.get("base", 0.0)
    rates: list[float] = [lr for _, lr in facts["lrs"]]
    if len(rates) < STRAIGHT or not case.watched[0].lr < BELOW * base < BEYOND * base < rates[-1]:
        return False
    rises = [later - earlier for earlier, later in pairwise(rates)]
    return max(rises) <= (1 + EVEN) * min(rises)


def base_is_the_highest(case: Case) -> Iterator[Verdict]:
    """No schedule raises the learning rate above the one that the optimizer was made with."""
    facts: Facts = case.facts("schedule")
    base, parts = facts.get("base", 0.0), [part for each in facts.get("schedulers", ()) for part in each["parts"]]
    if not facts or not facts["steps"]:
        return
    if not base or not parts:
        yield NotApplicable("no schedule is attached to the optimizer")
        return
    known = [part["class"] for part in parts if part["class"] in TO_A_PEAK]
    above = [(step, lr) for step, lr in facts["lrs"] if lr > ABOVE * base]
    if known:
        yield NotApplicable(f"{known[0]} is told where to rise to")
    elif not above:
        yield Holds(f"at most {facts['peak']:.3g}, of {base:.3g}")
    else:
        step, lr = above[0]
        yield finding(
            "law.program.base_is_the_highest",
            "info",
            max(step, 1),
            symptom=f"the schedule raises the learning rate to {facts['peak']:.3g}, {facts['peak'] / base:.3g} times "
            f"that of the optimizer, {base:.3g}",
            cause="a factor of the schedule is above 1: multiplied for divided, a bracket that is lost, a wrong sign; "
            "fine where the rate is scaled on purpose",
            remedy="print the factor of every step before the run: it begins low, comes to 1 and falls",
            sure=0.75,
            stage="update",
            since_step=max(step, 1),
            evidence=[("learning rate", lr, f"<= {base:.4g}"), ("schedule", parts[0]["class"])],
        )
