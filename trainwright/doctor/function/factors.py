"""The laws of what the first steps learn better without: constant factors, what is cut off of data, poles."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.doctor.case import Case, FactsOfFamily
from trainwright.doctor.finding import ExperimentRequest, finding, in_words
from trainwright.doctor.function.facts import FactorsFacts, WithAndWithout, WithoutFactorFacts
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.runlog.records import Where

ENOUGH = 32
"""Steps that show what is learned with a factor and without."""
MORE, FELL, LOWER = 1.25, 0.05, 0.1
"""Times what the steps took off the loss; shares of the loss: what it must fall by, and be lower by in the end."""


def factors_do_no_harm(case: Case) -> Iterator[Verdict]:
    """Without a factor that is far from 1 the first steps do not learn far more."""
    odd = next((facts.odd for _, facts in reversed(case.every(FactorsFacts))), None)
    if odd is None:
        return
    if not odd:
        yield NotApplicable("no factor in the model is far from 1")
        return
    facts = case.newest(WithoutFactorFacts)
    if facts is None:
        yield from due(case, WithoutFactorFacts)
        return
    if not does_harm(facts):
        yield Holds(f"loss {facts.after:.4g} with the factor {facts.factor:g}, {facts.after_without:.4g} without it")
        return
    yield finding(
        "law.function.factors_do_no_harm",
        "warning",
        case.last_step,
        symptom=f"steps {facts.since} to {facts.until} bring the loss to {facts.after:.4g}; without the factor "
        f"{facts.factor:g} in {in_words(facts.module)} they bring it to {facts.after_without:.4g}",
        cause="it is off by orders of magnitude: what it is put on saturates what follows, or does nothing there",
        remedy=f"leave the factor {facts.factor:g} out, or bring it near to 1",
        sure=0.8,
        stage="forward",
        where=Where(module=facts.module, source=facts.line),
        since_step=1,
        evidence=losses_of(facts, "without it"),
    )


def does_harm(facts: WithAndWithout) -> bool:
    """Either the model learns much less with what is left out, or it begins and stays far above where it could."""
    fell, fell_without = facts.before - facts.after, facts.before_without - facts.after_without
    learns = fell_without > max(MORE * fell, FELL * abs(facts.before_without))
    is_lost = math.isinf(facts.after) or facts.before > MORE * facts.before_without
    is_lower = facts.after - facts.after_without > LOWER * abs(facts.after_without)
    is_sure = facts.surely or (math.isinf(facts.after) and math.isfinite(facts.after_without))
    return is_sure and is_lower and (learns or (is_lost and fell_without > 0.0))


def due(case: Case, kind: type[FactsOfFamily]) -> Iterator[Verdict]:
    """What there is to say where nothing was measured so far."""
    if (why := case.blind(kind)) is not None:
        yield NotApplicable(why)
    elif case.last_step >= ENOUGH or case.finished:
        yield ExperimentRequest(kind.experiment)


def losses_of(facts: WithAndWithout, how: str) -> list[tuple[str, list[float]]]:
    return [
        ("loss before and after these steps", [round(facts.before, 6), round(facts.after, 6)]),
        (f"the same {how}", [round(facts.before_without, 6), round(facts.after_without, 6)]),
    ]
