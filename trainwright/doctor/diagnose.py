"""From a case to findings: the first cause first, what follows from it as its consequences."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainwright.doctor import FAMILIES
from trainwright.doctor import checks as _all_checks  # noqa: F401  registers them
from trainwright.doctor.call_lines import calls_at, line_for
from trainwright.doctor.case import Case
from trainwright.doctor.finding import CHECKS, STAGES, Check, ExperimentRequest, Finding, finding
from trainwright.errors import text_of

_SEVERITIES = ("critical", "warning", "info")


class Diagnosis(NamedTuple):
    """Findings, the first cause first, and the experiments that would tell more."""

    findings: tuple[Finding, ...]
    requests: tuple[ExperimentRequest, ...]


def diagnose(case: Case) -> Diagnosis:
    """Runs every check. A finding that explains others takes them in as its consequences.

    Of several findings with the same code the surest stays.
    """
    findings: dict[str, Finding] = {}
    requests: dict[ExperimentRequest, None] = {}
    for check in (*CHECKS, *(each for family in FAMILIES for each in family.checks)):
        for result in _results(check, case):
            if isinstance(result, ExperimentRequest):
                requests[result] = None
            elif (known := findings.get(result.found.code)) is None or result.found.sure > known.found.sure:
                findings[result.found.code] = result
    ordered = sorted(_folded(findings.values()), key=_rank)
    return Diagnosis(tuple(_with_line(case, each) for each in ordered), tuple(requests))


def _results(check: Check, case: Case) -> Sequence[Finding | ExperimentRequest]:
    """What a check yields. An exception of its own becomes an info finding: it must not end anybody's training."""
    try:
        return list(check(case))
    except Exception as error:
        failed = finding(
            "doctor.failed",
            "info",
            case.last_step,
            symptom=f"the check {check.__name__} failed: {text_of(error)}",
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
            consequences = (*cause.found.consequences, *(f"{each.found.code}: {each.found.symptom}" for each in taken))
            whole = dataclasses.replace(cause, found=dataclasses.replace(cause.found, consequences=consequences))
            left = [whole if each is cause else each for each in left if each not in taken]
    return left


def _explains(cause: Finding, other: Finding) -> bool:
    return any(fnmatch.fnmatchcase(other.found.code, pattern) for pattern in cause.explains)


def _rank(finding: Finding) -> tuple[int, float, int]:
    """Severity first, then how sure it is in steps of a tenth, then where in a step it lies."""
    found = finding.found
    return (_SEVERITIES.index(found.severity), -round(found.sure, 1), STAGES.index(finding.stage))


def _with_line(case: Case, finding: Finding) -> Finding:
    """Points a finding at the call that it is about, where the recorder saw which line made that call."""
    found = finding.found
    line = line_for(found.code, calls_at(case, found.step)) if found.where.source is None else None
    if line is None:
        return finding
    where = dataclasses.replace(found.where, source=line)
    return dataclasses.replace(finding, found=dataclasses.replace(found, where=where))
