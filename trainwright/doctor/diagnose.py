"""Makes findings from measurements: root causes first, each with its consequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainwright.doctor.check import Check, CheckState, NotApplicable, Result, Results
from trainwright.doctor.context import RunContext, by_experiment
from trainwright.doctor.discovery import all_checks
from trainwright.doctor.finding import ExperimentRequest, Finding, make_finding
from trainwright.errors import text_of
from trainwright.runs.findings import rank
from trainwright.runs.records import Examined, Where, construct

FAILED_CODE = "doctor.failed"
TOPICS_OF_LEARNING = ("data", "gradient", "loss", "model", "optim", "precision", "schedule")

TOPICS_OUTSIDE_OF_MODEL = ("data", "optim", "schedule")


@dataclass(frozen=True)
class Diagnosis:
    """Findings, root causes first; requests for further experiments; and the result of each check."""

    findings: tuple[Finding, ...]
    requests: tuple[ExperimentRequest, ...]
    checks: tuple[CheckState, ...]


def diagnose(run: RunContext, checks: Sequence[Check] | None = None) -> Diagnosis:
    """Evaluates the checks and the user-defined checks. A finding that explains others lists them as consequences.

    Args:
        run: The measurements.
        checks: The checks to evaluate. Default: all of them.

    Returns:
        The findings, the requested experiments, and the result of each check.
    """
    chosen = all_checks() if checks is None else checks
    judged = [*((each.code, _results(each, run)) for each in chosen), *user_check_results(run)]
    results = [each for _, of_one in judged for each in of_one]
    findings = {each.found.code: each for each in results if isinstance(each, Finding)}
    requests = dict.fromkeys(each for each in results if isinstance(each, ExperimentRequest))
    states = tuple(_state(code, results) for code, results in judged)
    return Diagnosis(tuple(sorted(_folded(findings.values()), key=_rank)), tuple(requests), states)


def _results(check: Check, run: RunContext) -> list[Result]:
    """Returns the results of a check. An exception in a check becomes an info finding, so the training continues."""
    try:
        why = next((why for kind in check.needs if (why := run.not_measured(kind)) is not None), None)
        return list(check.results(run)) if why is None else [_NotExamined(why)]
    except Exception as error:
        failed = make_finding(
            FAILED_CODE,
            "info",
            run.last_step,
            symptom=f"the check {check.code} failed: {text_of(error)}",
            cause="a mistake in Trainwright: what this check looks for was not looked for",
            remedy="report it, with the run folder",
            sure=1.0,
        )
        return [failed]


class _NotExamined(NotApplicable):
    """A required measurement is missing."""


def _state(code: str, results: Sequence[Result]) -> CheckState:
    for each in results:
        if isinstance(each, Finding) and each.found.code != FAILED_CODE:
            return CheckState(code, "found", each.found.symptom)
    for each in results:
        if isinstance(each, _NotExamined):
            return CheckState(code, "not examined", each.why)
        if isinstance(each, NotApplicable):
            return CheckState(code, "not applicable", each.why)
    return CheckState(code, *(("not examined", "nothing was measured for it") if results else ("passed", "")))


def _folded(findings: Iterable[Finding]) -> list[Finding]:
    """Moves findings into the consequences of the finding that explains them: the first in the order of ``rank``."""
    left = sorted(findings, key=_rank)
    for cause in list(left):
        taken = [each for each in left if cause in left and each is not cause and _explains(cause, each)]
        if taken:
            consequences = (*cause.found.consequences, *(f"{each.found.code}: {each.found.symptom}" for each in taken))
            where = cause.found.where if cause.found.where != Where() else _place_of_first(cause, taken)
            whole = replace(cause, found=replace(cause.found, consequences=consequences, where=where))
            left = [whole if each is cause else each for each in left if each not in taken]
    return left


def _place_of_first(cause: Finding, consequences: Sequence[Finding]) -> Where:
    """Returns the first place of a consequence. If the cause is outside of the model, the line becomes ``shown_at``."""
    where = next((each.found.where for each in consequences if each.found.where != Where()), Where())
    if cause.found.code.partition(".")[0] not in TOPICS_OUTSIDE_OF_MODEL:
        return where
    return Where(rank=where.rank, sample_ids=where.sample_ids, shown_at=where.source)


def _explains(cause: Finding, other: Finding) -> bool:
    """Returns True if the cause lists the code of the other finding, or the other finding only names a symptom.

    Within TOPICS_OF_LEARNING, a symptom is explained by any finding above ``info`` that names a cause and ranks first.
    """
    one, two = cause.found, other.found
    is_symptom = one.names_cause and not two.names_cause and one.severity != "info" and rank(one) < rank(two)
    are_of_learning = all(each.code.partition(".")[0] in TOPICS_OF_LEARNING for each in (one, two))
    return (is_symptom and are_of_learning) or explains(cause.explains, two.code)


def explains(codes: Sequence[str], code: str) -> bool:
    """Returns True if ``codes`` contains ``code``, or its topic as ``topic.*``."""
    return code in codes or f"{code.partition('.')[0]}.*" in codes


def _rank(finding: Finding) -> tuple[int, bool, float, int]:
    return rank(finding.found)


USER_CHECK_PREFIX = "own."  # Prefix of the codes of user-defined checks, which are also the names of their experiments


@dataclass(frozen=True, kw_only=True)
class UserCheckFacts:
    """One call of a user-defined check. ``statement`` is its docstring; ``broken`` is the problem it found, or None."""

    statement: str
    broken: str | None


def user_check_results(run: RunContext) -> Iterator[tuple[str, list[Result]]]:
    """Yields the code and the results of each user-defined check in this run."""
    for code, outcomes in sorted(by_experiment(run.records).items()):
        if code.startswith(USER_CHECK_PREFIX):
            yield code, list(_user_results(code, outcomes))


def _user_results(code: str, outcomes: list[Examined]) -> Results:
    seen = [(each.step, construct(UserCheckFacts, each.values)) for each in outcomes if "blind" not in each.values]
    broken = [(step, facts) for step, facts in seen if facts.broken is not None]
    if not seen:
        yield NotApplicable(str(outcomes[-1].values["blind"]))
    if not broken:
        return
    since, _ = broken[0]
    step, facts = broken[-1]
    yield make_finding(
        code,
        "warning",
        step,
        symptom=str(facts.broken),
        cause=f"expected: {facts.statement}" if facts.statement else "one of your checks found it",
        remedy="see your function that is passed in checks=[...]",
        sure=0.9,
        since_step=since,
        evidence=[("replayed steps in which the check failed", len(broken), 0), ("replayed steps", len(seen))],
    )
