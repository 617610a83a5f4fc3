"""Which weights stand still from some step on: no gradient reaches them, and nothing else updates them."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.weights import MAX_NAMES, WeightsFacts
from trainwright.doctor.facts.wiring import WiringFacts


def standing(run: RunContext, names: Sequence[str], step: int) -> list[str] | None:
    """Those of the weights that have not changed since ``step``; None where the next examination will show it.

    A weight without a gradient that changes is updated otherwise: it follows a moving average, is moved by hand, or has
    its gradient from a loss that a replay does not see.
    """
    every = [facts for _, facts in run.every(WeightsFacts)]
    if not every:
        return list(names)
    if not run.finished and not any(facts.since >= step for facts in every):
        return None
    looks = [set(facts.unchanged) for facts in every if facts.since >= step - 1 and len(facts.unchanged) < MAX_NAMES]
    return [name for name in names if all(name in look for look in looks)]


def is_left_as_it_is(run: RunContext, names: Sequence[str]) -> bool:
    """Return whether weights without a gradient are used as they are: beside all that is trained, or trained before."""
    wiring, weights = run.latest(WiringFacts), run.latest(WeightsFacts)
    cuts = wiring.cuts if wiring is not None else ()
    beside = {name for each in cuts if each.aside for name in each.behind}
    beside -= {name for each in cuts if not each.aside for name in each.behind}
    return set(names) <= beside or (weights is not None and set(names) <= set(weights.worked_on))
