"""The law of the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Set

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.facts import CountedFacts

LOOKS = 3
"""Looks at which the same rows must be left out."""
CHANCE = 0.01
"""That a row is left out in all of them, where the loss leaves out rows for what they hold."""


def every_row_counts(case: Case) -> Iterator[Verdict]:
    """No place in the batch is left out of the loss."""
    every = case.since_change(CountedFacts)
    if not every and (why := case.blind(CountedFacts)) is not None:
        yield NotApplicable(why)
        return
    sizes = {facts.rows for _, facts in every}
    without = [set(facts.idle) - set(facts.chosen) for _, facts in every]
    always = set.intersection(*without) if without else set()
    if every and (not always or len(sizes) > 1):
        yield Holds(f"{every[-1][1].rows} rows in {len(every)} steps")
        return
    if len(every) < LOOKS:
        if case.last_step > (every[-1][0] if every else 0):
            yield ExperimentRequest(CountedFacts.experiment)
        return
    rows = sizes.pop()
    if len(always) == rows:
        yield NotApplicable("no row has a gradient in a replay, which does not see how the loss is made")
        return
    if (why := _why_not(every[0][1], every[-1][1], always)) is not None:
        yield NotApplicable(why)
        return
    others = max(len(facts.idle) for _, facts in every) - len(always)
    if rows * (others / max(1, rows - len(always))) ** LOOKS > CHANCE:
        yield NotApplicable(f"the loss leaves out {others} of {rows} rows for what they hold")
        return
    places = sorted(always)
    yield finding(
        "law.loss.every_row_counts",
        "warning",
        every[-1][0],
        symptom=f"{len(places)} of {rows} rows of each batch have no part in the loss: "
        + (f"row {places[0]}" if len(places) == 1 else f"rows {places[0]} to {places[-1]}"),
        cause="a slice or an index along the first dimension cuts samples off",
        remedy="look at the slices between the outputs and the loss: the first dimension holds the samples",
        sure=0.85,
        stage="loss",
        since_step=every[0][0],
        evidence=[("rows without a gradient, in each step", [list(facts.idle)[:8] for _, facts in every], [])],
    )


def _why_not(first: CountedFacts, last: CountedFacts, always: Set[int]) -> str | None:
    """Why rows may be left out by their place, where no loader says that they are samples."""
    if last.are_samples:
        return None
    if first.total == last.total:
        return "each step has the same batch, of which a mask may choose a part"
    if always <= {0, last.rows - 1}:
        return "the batch may be one sequence, of which the first or last position has no target"
    return None
