"""Checks of the user's own, judged by what a run has recorded of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.doctor.check import NotApplicable, Passed, Result
from trainwright.doctor.context import RunContext, by_experiment
from trainwright.doctor.finding import make_finding
from trainwright.runs.records import Examined, construct

OWN = "own."
"""What their codes begin with, which are also the names of their experiments."""


@dataclass(frozen=True, kw_only=True)
class OwnCheckFacts:
    """One call of the user's function. ``statement`` is its docstring; ``broken`` what it returned: None, or a text."""

    statement: str
    broken: str | None


def own_states(run: RunContext) -> Iterator[tuple[str, list[Result]]]:
    """The code and the results of each check of the user's own that was made in this run."""
    for code, outcomes in sorted(by_experiment(run.records).items()):
        if code.startswith(OWN):
            yield code, [_judged(code, outcomes)]


def _judged(code: str, outcomes: list[Examined]) -> Result:
    seen = [(each.step, construct(OwnCheckFacts, each.values)) for each in outcomes if "blind" not in each.values]
    broken = [(step, facts) for step, facts in seen if facts.broken is not None]
    if not seen:
        return NotApplicable(str(outcomes[-1].values["blind"]))
    if not broken:
        return Passed(f"{len(seen)} replayed steps")
    since, _ = broken[0]
    step, facts = broken[-1]
    return make_finding(
        code,
        "warning",
        step,
        symptom=str(facts.broken),
        cause=f"expected: {facts.statement}" if facts.statement else "a check of your own found it",
        remedy="see the check: it is your own function, given as checks=[...]",
        sure=0.9,
        since_step=since,
        evidence=[("replayed steps in which it was found", len(broken), 0), ("replayed steps", len(seen))],
    )
