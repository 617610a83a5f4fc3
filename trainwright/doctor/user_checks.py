"""Evaluates the recorded results of user-defined checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.doctor.check import NotApplicable, Result, Results
from trainwright.doctor.context import RunContext, by_experiment
from trainwright.doctor.finding import make_finding
from trainwright.runs.records import Examined, construct

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
            yield code, list(_results(code, outcomes))


def _results(code: str, outcomes: list[Examined]) -> Results:
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
