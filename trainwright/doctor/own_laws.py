"""Laws of the user's own, judged by what a run has recorded of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding
from trainwright.doctor.law import OF_LAWS, Holds, Law, NotApplicable, Verdict
from trainwright.runlog.records import Examined, construct

OWN = "own."
"""What the names of their experiments and of the laws begin with."""


@dataclass(frozen=True, kw_only=True)
class OwnLawFacts:
    """What came of one look. ``statement`` is what the law says; ``broken`` how it was broken, None where it held."""

    statement: str
    broken: str | None


def own_laws(case: Case) -> list[Law]:
    """The laws of the user's own that were looked at in this run."""
    names = {each.experiment for each in case.records if isinstance(each, Examined) and each.experiment.startswith(OWN)}
    return [Law(name, partial(_judged, name), effort="replay") for name in sorted(names)]


def _judged(name: str, case: Case) -> Iterator[Verdict]:
    looks = case.outcomes(name)
    seen = [(each.step, construct(OwnLawFacts, each.values)) for each in looks if "blind" not in each.values]
    broken = [(step, facts) for step, facts in seen if facts.broken is not None]
    if not seen:
        yield NotApplicable(str(looks[-1].values["blind"]))
    elif not broken:
        yield Holds(f"{len(seen)} steps that were run again")
    else:
        since, _ = broken[0]
        step, facts = broken[-1]
        code = OF_LAWS + name
        yield finding(
            code,
            "warning",
            step,
            symptom=str(facts.broken),
            cause=f"it should be so: {facts.statement}" if facts.statement else "a law of your own is broken",
            remedy="see the law: it is your own function, given as laws=[...]",
            sure=0.9,
            since_step=since,
            evidence=[("looks in which it was broken", len(broken), 0), ("looks", len(seen))],
        )
