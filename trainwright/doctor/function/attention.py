"""Laws of attention: it takes an average of values, and tells them apart."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.runlog.records import Where

ROUNDED = 0.05
"""Of the sum of weights: bfloat16 leaves less."""
LONG, FLAT, GROWS = 48, 1e-3, 10.0
"""Steps of a run that is no trial; scores that differ by less give weights that are equal to a thousandth; how much
more they differ later where they were made 0 at first."""


def attention_is_an_average(case: Case) -> Iterator[Verdict]:
    """The weights that a softmax gives to the values that they are multiplied with add up to 1."""
    looks = [each.values["attention"] for each in case.outcomes("layers") if each.values.get("attention")]
    if not looks:
        yield NotApplicable("no softmax is multiplied with values")
        return
    off = {path: facts["off"] for path, facts in looks[-1].items() if facts.get("off", 0.0) > ROUNDED}
    if not off:
        yield Holds(f"{len(looks[-1])} softmaxes")
        return
    path = max(off, key=off.__getitem__)
    yield finding(
        "law.function.attention_is_an_average",
        "warning",
        max(1, case.last_step),
        symptom=f"the weights of attention in {path or 'the model'} do not add up to 1 over the values that they "
        f"weigh: the sum is off by {off[path]:.3g} in half of the rows",
        cause="the softmax is taken over another dimension than that of the keys, or the weights are multiplied with "
        "the values in another order",
        remedy="softmax(scores, dim=-1) for scores of (..., queries, keys), then weights @ values",
        sure=0.85,
        stage="forward",
        where=Where(module=path),
        evidence=[("distance of the sum of weights from 1", round(off[path], 4), 0.0)],
    )


def attention_tells_apart(case: Case) -> Iterator[Verdict]:
    """At the end of a run the scores of attention differ from key to key."""
    looks = [each.values["attention"] for each in case.outcomes("layers") if each.values.get("attention")]
    if not looks or not case.finished:
        return
    if case.last_step < LONG or len(looks) < 2:
        yield NotApplicable("too short a run")
        return
    last = {path: facts["contrast"] for path, facts in looks[-1].items() if facts.get("contrast", 0.0) > 0.0}
    first = {path: looks[0].get(path, {}).get("contrast", 0.0) for path in last}
    flat = [path for path, value in last.items() if value < FLAT and value < GROWS * first[path]]
    if not flat:
        yield Holds(", ".join(f"{value:.3g} in {path}" for path, value in list(last.items())[:3]))
        return
    yield finding(
        "law.function.attention_tells_apart",
        "warning",
        case.last_step,
        symptom=f"attention in {flat[0] or 'the model'} weighs every key alike after {case.last_step} steps: the "
        f"scores of a query lie within {last[flat[0]]:.2g} of each other",
        cause="the scores are made far too small: divided by a power of the size that is too high, or a factor that "
        "does not belong there",
        remedy="divide the scores by the root of the size of a head, once",
        sure=0.75,
        stage="forward",
        where=Where(module=flat[0]),
        evidence=[("distance of the largest from the smallest score", last[flat[0]], f"> {FLAT}")],
    )
