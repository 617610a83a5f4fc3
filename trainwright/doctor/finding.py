"""Results of checks: a finding with the trial of its remedy, or a request for an experiment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict, Unpack

from trainwright.runs.findings import Severity as Severity
from trainwright.runs.findings import Stage as Stage
from trainwright.runs.json_values import JsonValue
from trainwright.runs.records import Evidence, Found, Where

Measured: TypeAlias = tuple[str, JsonValue] | tuple[str, JsonValue, JsonValue]
"""A line of evidence: description, measured value, and expected value (left out if there is none)."""

Calls: TypeAlias = Sequence[tuple[str, str]]
"""Recorded calls of a step with their lines, such as ``("backward", "train.py:44")``."""


@dataclass(frozen=True)
class RemedyTrial:
    """A remedy that a replay can try: its name in ``doctor.remedies.TRIALS``, and the arguments of the trial."""

    name: str
    args: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A finding: its record, and the data for folding consequences into it and for trying its remedy.

    ``explains`` are the codes of its consequences, or topics such as ``loss.*``.
    """

    found: Found
    trial: RemedyTrial | None = None
    explains: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExperimentRequest:
    """A request for an experiment on recorded step ``step`` (None: the newest one)."""

    experiment: str
    step: int | None = None


class Details(TypedDict, total=False):
    """Optional parts of a finding. ``since_step`` is the first step that shows the fault."""

    where: Where
    evidence: Iterable[Measured]
    since_step: int | None
    trial: RemedyTrial | None
    explains: Iterable[str]
    stage: Stage
    names_cause: bool


def make_finding(
    code: str,
    severity: Severity,
    step: int,
    *,
    symptom: str,
    cause: str,
    remedy: str,
    sure: float,
    **details: Unpack[Details],
) -> Finding:
    """Returns a Finding with its record. ``sure`` is a probability, 0 to 1."""
    found = Found(
        time_s=0.0,
        code=code,
        severity=severity,
        step=step,
        symptom=symptom,
        cause=cause,
        remedy=remedy,
        sure=sure,
        evidence=tuple(Evidence(measure=e[0], seen=e[1], expected=(*e, None)[2]) for e in details.get("evidence", ())),
        since_step=details.get("since_step"),
        where=details.get("where", Where()),
        stage=details.get("stage", "loop"),
        names_cause=details.get("names_cause", True),
    )
    return Finding(found, details.get("trial"), tuple(details.get("explains", ())))


CALLS_OF_STAGES = {
    "input": ("forward",),
    "label": ("op:", "forward"),
    "forward": ("forward",),
    "loss": ("op:", "backward"),
    "backward": ("backward",),
    "clip": ("clip", "step"),
    "update": ("step",),
    "buffers": ("forward",),
    "loop": ("step", "backward", "forward"),
}
"""Kinds of calls by stage of a finding, the most likely first. ``op:`` is the prefix of torch functions in the loss."""


def line_of_stage(found: Found, calls: Calls) -> str | None:
    """Returns the line of the call that belongs to the stage of a finding; None if it was not recorded."""
    for kind in CALLS_OF_STAGES.get(found.stage, ()):
        lines = [line for name, line in calls if name == kind or (kind.endswith(":") and name.startswith(kind))]
        if lines:
            return lines[-1]
    return None


def in_words(module: str | None) -> str:
    """Returns words for a module path. "" is the full model; None is code outside of all modules, such as the loss."""
    return "the loss" if module is None else module or "the model itself"
