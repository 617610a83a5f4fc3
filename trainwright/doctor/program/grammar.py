"""The grammar of a step: which call may follow which, as patterns over the letters of its calls.

A step is the word of its calls for one optimizer, from the end of the update before up to its own: ``zfbcs`` is
zero_grad, forward, backward, clip, step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.doctor.finding import Severity, Stage
from trainwright.runlog.records import Watched

LETTERS: Mapping[str, str] = {
    "forward": "f",
    "backward": "b",
    "autograd_grad": "b",
    "zero_grad": "z",
    "unscale": "u",
    "clip": "c",
    "step": "s",
    "scaler_skipped": "s",
    "scaler_update": "a",
    "schedule": "l",
}
"""By kind of event. What is not here is not part of the order."""
WORDS: Mapping[str, str] = {
    "f": "forward", "b": "backward", "z": "zero_grad", "u": "unscale_", "c": "clip", "s": "step",
    "a": "scaler.update", "l": "scheduler.step",
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """What may not occur. ``wrong`` matches the part of a word that breaks it; ``call`` is the kind to be moved.

    ``alone``: only where there is one optimizer, for the calls do not say whose gradients they mean. ``needs`` is a
    letter that most words must have, or the loop works by other rules.
    """

    wrong: re.Pattern[str]
    call: str
    alone: bool
    needs: str
    severity: Severity
    stage: Stage
    symptom: str
    cause: str
    remedy: str


RULES: tuple[Rule, ...] = (
    Rule(
        re.compile(r"(?:^|s)[^bs]*s"),
        call="step",
        alone=False,
        needs="b",
        severity="warning",
        stage="update",
        symptom="an update is made without a backward pass since the one before it",
        cause="step() is called once too often, or backward() in some steps only: the same gradients are used twice",
        remedy="call step() once after each backward(), or after each window of them",
    ),
    Rule(
        re.compile(r"b[^bs]*z[^bs]*s"),
        call="zero_grad",
        alone=False,
        needs="b",
        severity="warning",
        stage="update",
        symptom="the gradients are dropped before the update that they are for",
        cause="zero_grad() comes between backward() and step()",
        remedy="move zero_grad() before backward(), or behind step()",
    ),
    Rule(
        re.compile(r"(?:^|s|z)[^bs]*c"),
        call="clip",
        alone=True,
        needs="b",
        severity="warning",
        stage="clip",
        symptom="gradients are clipped where there are none that an update will use",
        cause="the clip comes before backward(), or after step()",
        remedy="clip between backward() and step()",
    ),
    Rule(
        re.compile(r"c[^bs]*u"),
        call="clip",
        alone=True,
        needs="u",
        severity="warning",
        stage="clip",
        symptom="gradients are clipped with the loss scale still in them, and divided by it afterwards",
        cause="the clip comes before scaler.unscale_(optimizer)",
        remedy="call scaler.unscale_(optimizer) right before the clip",
    ),
    Rule(
        re.compile(r"b[^bs]*l[^bs]*s"),
        call="schedule",
        alone=True,
        needs="b",
        severity="info",
        stage="loop",
        symptom="the schedule advances between backward() and step(), so every update has the rate of the next one",
        cause="scheduler.step() comes before optimizer.step(): the first rate of the schedule is never used",
        remedy="call scheduler.step() after optimizer.step()",
    ),
)


def word(record: Watched, optimizer: int) -> str:
    """The letters of the calls of a step that concern one optimizer, by its number."""
    return "".join(
        LETTERS[kind] for kind, value in record.events if kind in LETTERS and _is_for(kind, value, optimizer)
    )


def _is_for(kind: str, value: object, optimizer: int) -> bool:
    if kind == "forward":
        return isinstance(value, list | tuple) and bool(value[2])  # those without gradients are evaluations
    if kind == "step":
        return isinstance(value, dict) and value["optimizer"] == optimizer
    if kind in ("zero_grad", "unscale", "scaler_skipped"):
        return value in (optimizer, -1)
    return True


def spelled(letters: str) -> str:
    """A word as the names of its calls."""
    return " ".join(WORDS[each] for each in letters)
