"""From a case to findings: the first cause first, what follows from it as its consequences."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainwright.doctor import checks as _all_checks  # noqa: F401  registers them
from trainwright.doctor.case import Case
from trainwright.doctor.finding import CHECKS, STAGES, Check, ExperimentRequest, Finding, finding

_SEVERITIES = ("critical", "warning", "info")


class Diagnosis(NamedTuple):
    """Findings, the first cause first, and what would tell more."""

    findings: tuple[Finding, ...]
    wishes: tuple[ExperimentRequest, ...]


def diagnose(case: Case) -> Diagnosis:
    """Asks every check. A finding that explains others takes them in as its consequences."""
    findings: dict[str, Finding] = {}
    wishes: dict[ExperimentRequest, None] = {}
    for check in CHECKS:
        for said in _said(check, case):
            if isinstance(said, ExperimentRequest):
                wishes[said] = None
            elif (known := findings.get(said.found.code)) is None or said.found.sure > known.found.sure:
                findings[said.found.code] = said
    return Diagnosis(tuple(_in_order(_folded(findings.values()))), tuple(wishes))


def _said(check: Check, case: Case) -> Sequence[Finding | ExperimentRequest]:
    """What a check says. Its own mistake is told and is not the loop's: nobody's run ends by it."""
    try:
        return list(check(case))
    except Exception as error:
        failed = finding(
            "doctor.failed",
            "info",
            case.last_step,
            symptom=f"the check {check.__name__} failed: {type(error).__name__}: {error}",
            cause="a mistake in Trainwright: what this check looks for was not looked for",
            remedy="report it, with the run folder",
            sure=1.0,
        )
        return [failed]


def _folded(findings: Iterable[Finding]) -> list[Finding]:
    """Takes a finding that another explains out of the list and into that one's consequences."""
    left = sorted(findings, key=_rank)
    for cause in list(left):
        if cause not in left:
            continue
        taken = [other for other in left if other is not cause and _explains(cause, other)]
        if taken:
            told = (*cause.found.consequences, *(f"{other.found.code}: {other.found.symptom}" for other in taken))
            whole = dataclasses.replace(cause, found=dataclasses.replace(cause.found, consequences=told))
            left = [whole if each is cause else each for each in left if each not in taken]
    return left


def _explains(cause: Finding, other: Finding) -> bool:
    return any(fnmatch.fnmatchcase(other.found.code, pattern) for pattern in cause.explains)


def _in_order(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=_rank)


def _rank(finding: Finding) -> tuple[int, float, int]:
    """Severity first, then how sure it is in three classes, then where in a step it lies."""
    found = finding.found
    return (_SEVERITIES.index(found.severity), -round(found.sure, 1), STAGES.index(finding.stage))
