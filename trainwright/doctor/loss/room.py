"""The law of the room that the terms of a loss leave each other."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import LearnedFacts, RoomFacts
from trainwright.runlog.records import Where

ENOUGH = 32
"""Steps that show what is learned of a comparison alone."""
FELL, PART, HALF = 0.1, 0.25, 0.5
"""Of its first loss: what it must lose alone; of that: what is hardly anything, and what a whole run must gain."""


def terms_leave_room(case: Case) -> Iterator[Verdict]:
    """The comparison with targets is learned beside the other terms, in the whole run, as in a few steps alone."""
    facts = case.newest(RoomFacts)
    if facts is None:
        if (why := case.blind(RoomFacts)) is not None:
            yield NotApplicable(why)
        elif case.last_step >= ENOUGH or case.finished:
            yield ExperimentRequest(RoomFacts.experiment)
        return
    alone = facts.before - facts.alone
    if not (facts.surely and alone > FELL * facts.before and facts.before - facts.after < PART * alone):
        yield Holds(f"{facts.name} {facts.after:.4g} after {facts.until} steps, {facts.alone:.4g} alone")
        return
    end = _end(case, facts.name)
    if end is None:
        yield NotApplicable(f"{facts.name} is hardly learned at first: the end of the run tells")
    elif facts.before - end >= HALF * alone:
        yield Holds(f"{facts.name} {end:.4g} at the end, {facts.alone:.4g} after {facts.until} steps alone")
    else:
        yield _crowded_out(case, facts, end)


def _end(case: Case, name: str) -> float | None:
    """Its loss with the last weights."""
    learned = case.newest(LearnedFacts) if case.finished else None
    values = [each.value for each in learned.calls if each.op == name] if learned is not None else []
    return values[0] if len(values) == 1 else None


def _crowded_out(case: Case, facts: RoomFacts, end: float) -> Verdict:
    return finding(
        "law.loss.terms_leave_room",
        "warning",
        case.last_step,
        symptom=f"{facts.name} is {end:.4g} after {case.last_step} steps; without the other terms {facts.until} steps "
        f"bring it from {facts.before:.4g} to {facts.alone:.4g}, with them to {facts.after:.4g}",
        cause=f"{facts.other}, with the weight {facts.weight:g}, decides every update: nothing is learned of the "
        "targets",
        remedy="give it a weight with which its gradient is no larger than that of the comparison",
        sure=0.8,
        stage="loss",
        where=Where(op=facts.other),
        since_step=1,
        evidence=[(f"{facts.name} at the end", end, facts.alone), (f"weight of {facts.other}", facts.weight, 1.0)],
    )
