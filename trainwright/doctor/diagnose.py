"""From what was measured to findings: the first cause first, with what follows from it as its consequences."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainwright.doctor import FAMILIES
from trainwright.doctor.call_lines import calls_at, line_for
from trainwright.doctor.case import Case
from trainwright.doctor.check import Check, CheckState, Compared, NotApplicable, Result
from trainwright.doctor.discovery import default_checks
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, make_finding
from trainwright.doctor.law import Law
from trainwright.doctor.own_checks import own_states
from trainwright.errors import text_of
from trainwright.runlog.findings import SEVERITIES, rank
from trainwright.runlog.records import Where

LAWS: tuple[Law, ...] = tuple(law for family in FAMILIES for law in family.laws)
NAMES: tuple[OldCheck, ...] = tuple(name for family in FAMILIES for name in family.names)
FAILED = "doctor.failed"


@dataclass(frozen=True)
class Diagnosis:
    """Findings, the first cause first; the experiments that would tell more; and the result of each check."""

    findings: tuple[Finding, ...]
    requests: tuple[ExperimentRequest, ...]
    checks: tuple[CheckState, ...]


def diagnose(run: Case, checks: Sequence[Check] | None = None) -> Diagnosis:
    """Make all checks. A finding that explains others takes them in as its consequences.

    Of several findings with the same code the one with the highest confidence stays.

    Args:
        run: What was measured.
        checks: Those to make. Default: all but the packs.
    """
    judged: list[tuple[str, list[Result]]] = []
    for check in default_checks() if checks is None else checks:
        judged.append((check.code, _results(check.code, partial(_made, check, run), run)))
    for law in LAWS:
        results = _results(law.name, partial(law.judge, run), run)
        judged.append((law.name, [_named(each, law) for each in results]))
    others = [result for name in NAMES for result in _results(name.__name__, partial(name, run), run)]
    own = list(own_states(run))
    findings: dict[str, Finding] = {}
    requests: dict[ExperimentRequest, None] = {}
    for result in (*(each for _, results in (*judged, *own) for each in results), *others):
        if isinstance(result, ExperimentRequest):
            requests[result] = None
        elif isinstance(result, Finding):
            known = findings.get(result.found.code)
            if known is None or result.found.sure > known.found.sure:
                findings[result.found.code] = result
    states = tuple(_state(code, results) for code, results in (*judged, *own))
    ordered = sorted(_folded(findings.values()), key=_rank)
    return Diagnosis(tuple(_with_line(run, each) for each in ordered), tuple(requests), states)


def _made(check: Check, run: Case) -> Iterator[Result]:
    """What a check yields; nothing was examined where a measurement is missing that it needs."""
    for kind in check.needs:
        if (why := run.not_measured(kind)) is not None:
            yield _NotExamined(why)
            return
    yield from check.judge(run.judged_by(check))


class _NotExamined(NotApplicable):
    """A measurement is missing."""


def _named(result: Result, law: Law) -> Result:
    return replace(result, named_by=law.named_by) if isinstance(result, Finding) else result


def _state(code: str, results: Sequence[Result]) -> CheckState:
    for each in results:
        if isinstance(each, Finding) and each.found.code != FAILED:
            return CheckState(code, "found", each.found.symptom)
    for each in results:
        if isinstance(each, _NotExamined):
            return CheckState(code, "not examined", each.why)
        if isinstance(each, NotApplicable):
            return CheckState(code, "not applicable", each.why)
        if isinstance(each, Compared):
            return CheckState(code, "passed", each.what)
    if results or code in _LAW_NAMES:
        return CheckState(code, "not examined", "nothing was measured for it")
    return CheckState(code, "passed", "")


_LAW_NAMES = frozenset(law.name for law in LAWS)


def _results(code: str, judge: Callable[[], Iterator[Any]], run: Case) -> list[Result]:
    """What a check yields. An exception of its own becomes an info finding: it must not end any training."""
    try:
        return list(judge())
    except Exception as error:
        failed = make_finding(
            FAILED,
            "info",
            run.last_step,
            symptom=f"the check {code} failed: {text_of(error)}",
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
            every = [cause.found, *(each.found for each in taken)]
            general = [cause.found, *(e.found for e in taken if _is_among(cause.found.code, e.named_by))]
            severity = min((each.severity for each in general), key=SEVERITIES.index)
            where = next((each.where for each in every if each.where != Where()), Where())
            whole = replace(
                cause, found=replace(cause.found, consequences=consequences, severity=severity, where=where)
            )
            left = [whole if each is cause else each for each in left if each not in taken]
    return left


def _explains(cause: Finding, other: Finding) -> bool:
    return _is_among(other.found.code, cause.explains) or _is_among(cause.found.code, other.named_by)


def _is_among(code: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(code, pattern) for pattern in patterns)


def _rank(finding: Finding) -> tuple[int, bool, float, int]:
    return rank(finding.found)


def _with_line(run: Case, finding: Finding) -> Finding:
    """Points a finding at the call that it is about, where the recorder saw which line made that call."""
    found = finding.found
    line = line_for(found.code, calls_at(run, found.step)) if found.where.source is None else None
    if line is None:
        return finding
    return replace(finding, found=replace(found, where=replace(found.where, source=line)))
