"""See the function."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainwright.doctor.check import Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.finding import Finding
from trainwright.doctor.shared_calls import has_closure, kinds, optimizers_of, spelled, word
from trainwright.runlog.findings import Severity, Stage
from trainwright.runlog.records import Watched

MIN_STEPS = 2
"""Once may be a way to begin."""


class _Rule(NamedTuple):
    """``wrong`` matches the part of a word that breaks it, by the letters of ``shared_calls``.

    ``alone``: only with one optimizer, because the calls do not say whose gradients they mean. ``needs``: a letter that
    most words have, or the loop works otherwise.
    """

    wrong: str
    alone: bool
    needs: str
    severity: Severity
    stage: Stage
    symptom: str
    remedy: str


RULES = (
    _Rule(r"(?:^|s)[^bs]*s", False, "b", "warning", "update",
          "an update is made without a backward pass since the one before it",
          "call step() once after each backward()"),
    _Rule(r"b[^bs]*z[^bs]*s", False, "b", "warning", "update",
          "zero_grad() drops the gradients before the update that they are for",
          "move zero_grad() before backward(), or behind step()"),
    _Rule(r"(?:^|s|z)[^bs]*c", True, "b", "warning", "clip",
          "gradients are clipped where there are none that an update will use", "clip between backward() and step()"),
    _Rule(r"c[^bs]*u", True, "u", "warning", "clip", "gradients are clipped with the loss scale still in them",
          "call scaler.unscale_(optimizer) right before the clip"),
    _Rule(r"b[^bs]*l[^bs]*s", True, "b", "info", "loop",
          "scheduler.step() comes before optimizer.step(): the first rate of the schedule is never used",
          "call scheduler.step() after optimizer.step()"),
)  # fmt: skip


@check(names_cause=False, stage="update", confidence=0.9)
def calls_out_of_order(run: RunContext) -> Iterator[Result]:
    """Calls of a training step are out of order, missing or doubled.

    How it is detected: the calls of each recorded step form a word (zero_grad, forward, backward, unscale_, clip, step,
    scheduler.step). A pattern that no correct loop has must occur in two steps. With several optimizers, a backward
    pass must be used by one of them before all have dropped its gradients.

    Exceptions: optimizers with a closure decide the order themselves; loops that use gradients by hand.

    Usual cause: a call was left out, doubled, or moved behind an `if` or out of a loop.

    Fix: in this order: `optimizer.zero_grad()`, `loss.backward()`, `scaler.unscale_(optimizer)`, clip,
    `optimizer.step()`, `scheduler.step()`; with accumulation, all but `backward()` once for each window.

    Sources: TrainCheck (OSDI 2025) infers such rules from runs.
    """
    steps = [each for each in run.steps if not has_closure(each)]
    numbers = optimizers_of(steps)
    if len(steps) < MIN_STEPS or not numbers:
        return
    for number in numbers:
        words = [(step, word(step, number)) for step in steps]
        for rule in RULES:
            wrong = [(step, letters) for step, letters in words if re.search(rule.wrong, letters)]
            usual = sum(rule.needs in letters for _, letters in words)
            alone = len(numbers) == 1 or not rule.alone
            if alone and len(wrong) >= MIN_STEPS and usual and 2 * usual >= len(words) - len(wrong):
                yield _found(run, rule.symptom, rule.remedy, wrong, rule.severity, rule.stage)
                return
        carried = [
            (step, letters) for step, letters in words[1:] if "z" not in letters and "s" in letters and _carries(step)
        ]
        if len(carried) >= MIN_STEPS and any("z" in letters for _, letters in words):
            symptom = "some updates are made with gradients that the update before them has used already"
            yield _found(run, symptom, "call step() and zero_grad() equally often", carried, "warning", "backward")
            return
    unused = [(step, word(step, numbers[0])) for step in steps if _unused_backwards(step, numbers)]
    if len(numbers) > 1 and len(unused) >= MIN_STEPS and 2 * len(unused) >= len(steps):
        symptom = "the gradients of some backward passes of a step are dropped before an update uses them"
        yield _found(
            run, symptom, "call step() of an optimizer after each backward() for it", unused, "warning", "update"
        )
        return
    yield Passed(f"{len(steps)} steps: {spelled(word(steps[-1], numbers[-1]))}")


def _found(
    run: RunContext, symptom: str, remedy: str, wrong: Sequence[tuple[Watched, str]], severity: Severity, stage: Stage
) -> Finding:
    step, letters = wrong[-1]
    return run.finding(
        step.step,
        symptom=symptom,
        remedy=remedy,
        severity=severity,
        stage=stage,
        since_step=wrong[0][0].step,
        evidence=[("calls of such a step", spelled(letters)), ("recorded steps like this", len(wrong), 0)],
    )


def _carries(step: Watched) -> bool:
    """Whether gradients existed before the first backward pass of the step."""
    first = next((value for _, value in kinds(step, "backward")), None)
    return isinstance(first, dict) and bool(first.get("carried")) and not step.values.get("made_anew")


def _unused_backwards(step: Watched, optimizers: Sequence[int]) -> int:
    """Backward passes that no update used before every optimizer had dropped them."""
    live: list[set[int]] = []
    unused = 0
    for kind, value in step.events if not step.values.get("used_by_hand") else ():
        if kind == "backward":
            live.append(set(optimizers))
        elif kind == "step" and isinstance(value, dict):
            live = [each for each in live if value["optimizer"] not in each]
        elif kind == "scaler_skipped":
            live = []
        elif kind == "zero_grad":
            live = [each - (set(optimizers) if value == -1 else {value}) for each in live]
            unused += live.count(set())
            live = [each for each in live if each]
    return unused
