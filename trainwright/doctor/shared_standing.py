"""Finds weights that do not change from some step on: no gradient reaches them, and nothing else updates them."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.weights import MAX_NAMES, WeightsFacts
from trainwright.doctor.facts.wiring import WiringFacts


def standing(run: RunContext, names: Sequence[str], step: int) -> list[str] | None:
    """Returns the weights that have not changed since ``step``; None if only the next examination will show it.

    A weight without a gradient that changes follows a moving average, is changed by hand, or has a gradient from a loss
    outside of the replay.
    """
    every = [facts for _, facts in run.every(WeightsFacts)]
    if not every:
        return list(names)
    if not run.finished and not any(facts.since >= step for facts in every):
        return None
    looks = [set(facts.unchanged) for facts in every if facts.since >= step - 1 and len(facts.unchanged) < MAX_NAMES]
    return [name for name in names if all(name in look for look in looks)]


def is_left_as_it_is(run: RunContext, names: Sequence[str]) -> bool:
    """Returns True if weights without a gradient are used unchanged on purpose: outside of the trained path, or
    pretrained.
    """
    wiring, weights = run.latest(WiringFacts), run.latest(WeightsFacts)
    cuts = wiring.cuts if wiring is not None else ()
    beside = {name for each in cuts if each.aside for name in each.behind}
    beside -= {name for each in cuts if not each.aside for name in each.behind}
    return set(names) <= beside or (weights is not None and set(names) <= set(weights.worked_on))
