"""Which weights stand still from some step on: no gradient reaches them, and nothing else updates them."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.doctor.context import RunContext, by_experiment
from trainwright.doctor.vitals.facts import MOST_NAMES, VitalsFacts


def standing(run: RunContext, names: Sequence[str], step: int) -> list[str] | None:
    """Those of the weights that have not changed since ``step``; None where the next examination will show it."""
    every = [facts for _, facts in run.every(VitalsFacts)]
    if not every:
        return list(names)
    if not run.finished and not any(facts.since >= step for facts in every):
        return None
    looks = [set(facts.unchanged) for facts in every if facts.since >= step - 1 and len(facts.unchanged) < MOST_NAMES]
    return [name for name in names if all(name in look for look in looks)]


def is_left_as_it_is(run: RunContext, names: Sequence[str]) -> bool:
    """Return whether weights without a gradient are used as they are: beside all that is trained, or trained before."""
    outcomes, vitals = by_experiment(run.records).get("structure", []), run.latest(VitalsFacts)
    cuts = outcomes[-1].values.get("cuts", []) if outcomes else []
    beside = {name for each in cuts if each.get("aside") for name in each["behind"]}
    beside -= {name for each in cuts if not each.get("aside") for name in each["behind"]}
    return set(names) <= beside or (vitals is not None and set(names) <= set(vitals.worked_on))
