"""What a check says: a finding with the trial of its remedy, or the wish for an experiment that would tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.doctor.case import Case
from trainwright.runlog.records import Evidence, Found, Where

Severity = Literal["critical", "warning", "info"]
Stage = Literal["input", "label", "forward", "loss", "backward", "clip", "update", "buffers", "loop"]
STAGES: tuple[Stage, ...] = ("input", "label", "forward", "loss", "backward", "clip", "update", "buffers", "loop")
"""In the order in which a step passes them: what goes wrong first causes what goes wrong later."""


@dataclass(frozen=True)
class RemedyTrial:
    """A remedy in a form that a replay can try: a name that ``replay.trials`` knows, and what it takes."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A record to be written, and what is needed to order it, to fold others into it and to try its remedy."""

    found: Found
    stage: Stage = "loop"
    trial: RemedyTrial | None = None
    explains: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExperimentRequest:
    """The experiment that would tell, on the newest recorded step or on ``step``."""

    experiment: str
    step: int | None = None


def finding(
    code: str,
    severity: Severity,
    step: int,
    *,
    symptom: str,
    cause: str,
    remedy: str,
    sure: float,
    stage: Stage = "loop",
    **more: Any,
) -> Finding:
    """A Finding. ``more``: where (Where), evidence (tuples: measure, seen, expected), since_step, trial, explains."""
    evidence = tuple(
        Evidence(measure=str(each[0]), seen=each[1], expected=_third(each)) for each in more.pop("evidence", ())
    )
    trial, explains = more.pop("trial", None), tuple(more.pop("explains", ()))
    found = Found(
        time_s=0.0,
        code=code,
        severity=severity,
        step=step,
        symptom=symptom,
        cause=cause,
        remedy=remedy,
        sure=sure,
        evidence=evidence,
        since_step=more.pop("since_step", None),
        where=more.pop("where", Where()),
    )
    assert not more, f"finding() has no {sorted(more)}"
    return Finding(found, stage, trial, explains)


def _third(each: Sequence[Any]) -> Any:
    return each[2] if len(each) > 2 else None


Check = Callable[[Case], Iterator[Finding | ExperimentRequest]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Registers a check: a pure function of a Case."""
    CHECKS.append(function)
    return function
