"""What a check yields: a finding with the trial of its remedy, or a request for an experiment that would tell more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict, Unpack

from trainwright.runs.findings import Severity as Severity
from trainwright.runs.findings import Stage as Stage
from trainwright.runs.json_values import JsonValue
from trainwright.runs.records import Evidence, Found, Where

Measured: TypeAlias = tuple[str, JsonValue] | tuple[str, JsonValue, JsonValue]
"""A line of evidence: what was measured, what was seen, and what would be expected (left out where nothing is)."""


@dataclass(frozen=True)
class RemedyTrial:
    """A remedy in a form that a replay can try: its name in ``replay.trials``, and the arguments of that trial."""

    name: str
    args: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A record to be written, and what is needed to fold others into it and to try its remedy.

    ``explains`` are the codes of its consequences, or topics as ``loss.*``.
    """

    found: Found
    trial: RemedyTrial | None = None
    explains: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExperimentRequest:
    """The experiment that would tell more, on recorded step ``step`` (None: the newest one)."""

    experiment: str
    step: int | None = None


class Details(TypedDict, total=False):
    """What only some findings have. ``since_step`` is the first step that shows the fault."""

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
    """A Finding of its record. ``sure`` is between 0 and 1."""
    found = Found(
        time_s=0.0,
        code=code,
        severity=severity,
        step=step,
        symptom=symptom,
        cause=cause,
        remedy=remedy,
        sure=sure,
        evidence=tuple(map(_evidence, details.get("evidence", ()))),
        since_step=details.get("since_step"),
        where=details.get("where", Where()),
        stage=details.get("stage", "loop"),
        names_cause=details.get("names_cause", True),
    )
    return Finding(found, details.get("trial"), tuple(details.get("explains", ())))


def _evidence(row: Measured) -> Evidence:
    return Evidence(measure=row[0], seen=row[1], expected=row[2] if len(row) == 3 else None)


def in_words(module: str | None) -> str:
    """A module by its path: "" is the model as a whole; None, where no module runs, is the loss."""
    return "the loss" if module is None else module or "the model itself"


def listed(names: Sequence[str], limit: int = 3) -> str:
    """The first ``limit`` names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
