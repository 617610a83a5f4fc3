"""Laws of the figures of an evaluation: what the loop keeps is an average of what was computed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import Computed, EvaluationFacts, KeptNumber, ToldFacts
from trainwright.doctor.finding import Finding, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.runlog.records import Where

ROOM = 1.25
"""Times the range of the averages over batches: for a divisor that is not quite the number of rows."""
LEAST = 0.02
"""Of a share: smaller ones differ by more than that factor where a few rows do."""
OF_OTHERS = ("best", "min", "max", "prev", "last", "old", "first", "init", "base", "ema", "smooth", "avg", "target")
NO_AVERAGES = (*OF_OTHERS, "scale", "weight", "coef", "total", "sum", "run", "batch", "step", "cur", "item")
"""What a part of a name begins with: of another evaluation, of several, of one batch, or no average at all."""


def figures_are_averages(case: Case) -> Iterator[Verdict]:
    """A loss or accuracy that the loop keeps of an evaluation lies between the smallest and the largest of its
    batches.
    """
    facts, told = case.newest(EvaluationFacts), case.newest(ToldFacts)
    if facts is None or told is None:
        return
    kept = [each for each in facts.numbers if each.name in told.names and each.is_new and _is_average(each.name)]
    judged = [(each, _ranges_of(each, facts)) for each in kept if not each.is_sum]
    off = [(each, ranges[0]) for each, ranges in judged if ranges and not _is_in_any(each.value, ranges)]
    partial = [each for each in kept if each.is_partial]
    if partial:
        yield _partial(facts, partial[0])
    elif off:
        yield _off(facts, *off[0])
    elif not any(ranges for _, ranges in judged):
        yield NotApplicable("no loss or accuracy of the loop can be compared with what its evaluation computed")
    else:
        yield Holds(", ".join(f"{each.name} {each.value:.4g}" for each, _ in judged[:4]))


def _is_average(name: str) -> bool:
    return not any(part.startswith(NO_AVERAGES) for part in re.split("[^a-z]+", name.lower()))


def _ranges_of(number: KeptNumber, facts: EvaluationFacts) -> list[Computed]:
    """The averages over batches that it may be an average of; none where that cannot be told.

    A loss may be the sum of several losses.
    """
    name = number.name.lower()
    is_share = "acc" in name
    computed = [each for each in facts.computed if each.decided == is_share]
    if facts.arrays or not (is_share or "loss" in name):
        return []
    if is_share:
        return [each for each in computed if each.low >= 0 and each.high <= 1]
    by_line: dict[str | None, list[tuple[float, float]]] = {}
    for each in computed:
        by_line.setdefault(each.line, []).append((each.low, each.high))
    return computed if len(set(map(tuple, by_line.values()))) == 1 else []


def _is_in_any(value: float, computed: Sequence[Computed]) -> bool:
    return any(_is_in(number, each) for each in computed for number in (value, value / 100 if each.decided else value))


def _is_in(value: float, computed: Computed) -> bool:
    low, high = computed.low, computed.high
    least = LEAST if computed.decided else 0.0
    low, high = min(low / ROOM, low * ROOM) - least, max(high / ROOM, high * ROOM) + least
    return low <= value <= high


def _off(facts: EvaluationFacts, number: KeptNumber, nearest: Computed) -> Finding:
    what = "accuracy" if nearest.decided else "loss"
    return finding(
        "law.data.figures_are_averages",
        "warning",
        max(1, facts.after),
        symptom=f"{number.name} is {number.value:.4g} after an evaluation whose batches have a {what} of "
        f"{nearest.low:.4g} to {nearest.high:.4g}",
        cause="it is counted twice, divided by another number than was summed up, or has a factor or a sign too much",
        remedy="add up losses times their number of rows, and divide by the number of all rows once",
        sure=0.8,
        stage="loop",
        where=Where(source=nearest.line),
        evidence=[(number.name, number.value, [nearest.low, nearest.high]), ("how it was made", number.relation)],
    )


def _partial(facts: EvaluationFacts, number: KeptNumber) -> Finding:
    return finding(
        "law.data.figures_are_averages",
        "warning",
        max(1, facts.after),
        symptom=f"{number.name} is made of one batch of the evaluation alone: {number.relation}",
        cause="the sum begins anew with each batch, or is added to after the loop over the batches",
        remedy="set the sum to 0 once before the loop over the batches, and add to it inside",
        sure=0.85,
        stage="loop",
        where=Where(source=number.relation.rpartition(" at ")[2].partition(",")[0] or None),
        evidence=[(number.name, number.value), ("calls of the model in the evaluation", facts.calls)],
    )
