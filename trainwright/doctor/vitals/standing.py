"""Which weights stand still from some step on: those that no gradient reaches, and nothing else updates."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.vitals.facts import MOST_NAMES, VitalsFacts


def standing(case: Case, names: Sequence[str], step: int) -> list[str] | None:
    """Those of the weights that have not changed since ``step``; None where the next look will tell.

    A weight without a gradient that changes all the same is updated otherwise: it follows a moving average, is moved by
    hand, or has its gradient from a loss that a replay does not see.
    """
    every = [facts for _, facts in case.every(VitalsFacts)]
    if not every:
        return list(names)
    if not case.finished and not any(facts.since >= step for facts in every):
        return None
    looks = [set(facts.unchanged) for facts in every if facts.since >= step - 1 and len(facts.unchanged) < MOST_NAMES]
    return [name for name in names if all(name in look for look in looks)]


def is_left_as_it_is(case: Case, names: Sequence[str]) -> bool:
    """Whether weights without a gradient are used as they are: beside all that is trained, or trained before."""
    exam, vitals = case.newest("structure"), case.newest(VitalsFacts)
    cuts = exam.values.get("cuts", []) if exam else []
    beside = {name for each in cuts if each.get("aside") for name in each["behind"]}
    beside -= {name for each in cuts if not each.get("aside") for name in each["behind"]}
    return set(names) <= beside or (vitals is not None and set(names) <= set(vitals.worked_on))
