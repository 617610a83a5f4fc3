"""A part of a model that begins anew: which writes to weights between two updates are new draws of the first ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainwright.doctor.finding import Finding, finding, listed
from trainwright.doctor.update.facts import FirstSums, UpdateFacts
from trainwright.runlog.records import Where

DRAWS = 4
"""Standard deviations, at most, between the norms of two normal draws of one distribution; of uniform ones, 9."""
ENOUGH, MOST_DRAWN = 64, 16
"""Elements of which a norm says something; weights, from which on not all are named that were written to."""


def is_whole(facts: UpdateFacts | None) -> bool:
    """Whether all of the weights were written to, as far as they are named."""
    return facts is not None and len(facts.written) >= min(facts.tensors, MOST_DRAWN)


def is_drawn_anew(facts: UpdateFacts, begin: Mapping[str, FirstSums]) -> bool:
    """Whether some of the weights, and not all, have the norms of the first ones and other values: those of new draws.

    What an evaluation or a checkpoint leaves in the model is in all of it.
    """
    first = [(each, begin.get(each.name)) for each in facts.written]
    if is_whole(facts) or not any(of and of.elements >= ENOUGH for _, of in first):
        return False
    alike = all(of and abs(each.live_norm - of.norm) <= DRAWS * of.norm / math.sqrt(of.elements) for each, of in first)
    return alike and any(of and each.live_sum != of.sum for each, of in first)


def drawn_anew(step: int, names: Sequence[str], steps: Sequence[int]) -> Finding:
    """An info: nobody does so by mistake."""
    modules = {name.rpartition(".")[0] for name in names}
    return finding(
        "law.update.nothing_else_writes",
        "info",
        step,
        symptom=f"before step {step} {listed(names)} began anew: with other values, as large as the first ones",
        cause="a part is initialised again, as a head is whose classes have become others",
        remedy="nothing, where it is meant; else move the initialisation out of the loop",
        sure=0.7,
        stage="update",
        since_step=steps[0],
        where=Where(module=modules.pop() if len(modules) == 1 else None),
        evidence=[("steps that began so", len(steps), 0)],
    )
