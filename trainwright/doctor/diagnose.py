"""From a case to findings: the first cause first, what follows from it as its consequences."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from trainwright.doctor import FAMILIES
from trainwright.doctor.call_lines import calls_at, line_for
from trainwright.doctor.case import Case
from trainwright.doctor.finding import Check, ExperimentRequest, Finding, finding
from trainwright.doctor.law import Holds, Judge, Law, LawState, NotApplicable, Verdict
from trainwright.doctor.own_laws import own_laws
from trainwright.errors import UsageError, suggest, text_of
from trainwright.runlog.findings import SEVERITIES, rank
from trainwright.runlog.records import Where

LAWS: tuple[Law, ...] = tuple(law for family in FAMILIES for law in family.laws)
"""Of every family."""
NAMES: tuple[Check, ...] = tuple(name for family in FAMILIES for name in family.names)
"""Of every family: known causes."""


def choose_laws(names: Sequence[str]) -> tuple[Law, ...]:
    """The laws that ``names`` choose: ``all``, ``cheap``, a family, or a law by its name.

    Raises UsageError for a name of none, with the nearest.
    """
    chosen: dict[str, Law] = {}
    for name in names:
        some = [law for law in LAWS if _is_chosen(law, name)]
        if not some:
            known = ["all", "cheap", *(family.name for family in FAMILIES), *(law.name for law in LAWS)]
            raise UsageError(f"laws: there is no law {name!r}", remedy=suggest(name, known))
        chosen |= {law.name: law for law in some}
    return tuple(chosen.values())


def _is_chosen(law: Law, name: str) -> bool:
    family, _, _ = law.name.partition(".")
    return name in ("all", law.name, family) or (name == "cheap" and law.effort == "cheap")


class Diagnosis(NamedTuple):
    """Findings, the first cause first; the experiments that would tell more; and what became of each law."""

    findings: tuple[Finding, ...]
    requests: tuple[ExperimentRequest, ...]
    laws: tuple[LawState, ...]


def diagnose(case: Case, laws: Sequence[Law] = LAWS) -> Diagnosis:
    """Judges by the laws, and runs every check. A finding that explains others takes them in as its consequences.

    Of several findings with the same code the surest stays.
    """
    findings: dict[str, Finding] = {}
    requests: dict[ExperimentRequest, None] = {}

    def sort(results: Sequence[Verdict]) -> None:
        for result in results:
            if isinstance(result, ExperimentRequest):
                requests[result] = None
            elif isinstance(result, Finding) and _is_surer(result, findings.get(result.found.code)):
                findings[result.found.code] = result

    states = []
    for law in (*laws, *own_laws(case)):
        verdicts = _results(law.judge, law.name, case)
        sort([replace(each, named_by=law.named_by) if isinstance(each, Finding) else each for each in verdicts])
        states.append(_state(law.name, verdicts))
    for check in NAMES:
        sort(_results(check, check.__name__, case))
    ordered = sorted(_folded(findings.values()), key=_rank)
    return Diagnosis(tuple(_with_line(case, each) for each in ordered), tuple(requests), tuple(states))


def _is_surer(result: Finding, known: Finding | None) -> bool:
    return known is None or result.found.sure > known.found.sure


def _state(name: str, verdicts: Sequence[Verdict]) -> LawState:
    for each in verdicts:
        if isinstance(each, Finding) and each.found.code != "doctor.failed":
            return LawState(name, "broken", each.found.symptom)
    for each in verdicts:
        if isinstance(each, Holds):
            return LawState(name, "held", each.checked)
        if isinstance(each, NotApplicable):
            return LawState(name, "not applicable", each.why)
    return LawState(name, "not looked at", "nothing was measured for it")


def _results(judge: Judge | Check, name: str, case: Case) -> Sequence[Verdict]:
    """What a law or a check yields. An exception of its own becomes an info finding: it must not end any training."""
    try:
        return list(judge(case))
    except Exception as error:
        failed = finding(
            "doctor.failed",
            "info",
            case.last_step,
            symptom=f"the check {name} failed: {text_of(error)}",
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
            every = [cause.found, *(each.found for each in _named(cause, taken))]
            severity = min((each.severity for each in every), key=SEVERITIES.index)
            where = next((each.where for each in every if each.where != Where()), Where())
            found = replace(cause.found, consequences=consequences, severity=severity, where=where)
            whole = replace(cause, found=found)
            left = [whole if each is cause else each for each in left if each not in taken]
    return left


def _explains(cause: Finding, other: Finding) -> bool:
    return _is_among(other.found.code, cause.explains) or _is_among(cause.found.code, other.named_by)


def _named(cause: Finding, others: Iterable[Finding]) -> list[Finding]:
    """Breaks of laws that ``cause`` is the name of: what they cost, it costs."""
    return [each for each in others if _is_among(cause.found.code, each.named_by)]


def _is_among(code: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(code, pattern) for pattern in patterns)


def _rank(finding: Finding) -> tuple[int, bool, float, int]:
    return rank(finding.found)


def _with_line(case: Case, finding: Finding) -> Finding:
    """Points a finding at the call that it is about, where the recorder saw which line made that call."""
    found = finding.found
    line = line_for(found.code, calls_at(case, found.step)) if found.where.source is None else None
    if line is None:
        return finding
    where = replace(found.where, source=line)
    return replace(finding, found=replace(found, where=where))
