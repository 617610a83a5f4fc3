"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Passed, Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.loss import LossFacts
from trainwright.doctor.shared_loss import where_of

MAX_SPREAD, LOST, AT_LAST = 0.1, 0.25, 3
"""Spread of collapsed representations, also as a fraction of the first one; examined steps in a row."""


@check(stage="loss", confidence=0.85, needs=LossFacts)
def representation_collapse(run: RunContext) -> Iterator[Result]:
    """The representations have collapsed: all samples have nearly the same direction.

    Why it matters: a similarity loss is minimal where everything is equal. It looks perfect and nothing was learned.

    How it is detected: 1 minus the squared length of the mean of the normalized rows that a cosine similarity gets. It
    is about 1 for random directions and 0 for equal ones. Here it fell below 0.1 and below a quarter of its first
    value.

    Usual cause: a siamese loss without stop-gradient (`detach()`) on the targets, without negatives, or with a target
    network that is the online network.

    Looks like: a converged run, as the loss is near its minimum.

    Fix: `detach()` the target branch, as in SimSiam and BYOL; or add negatives or a variance term.

    Sources: PatrickHua/SimSiam#39, lightly-ai/lightly#559; arXiv 2011.10566.
    """
    facts = run.latest(LossFacts)
    for call in facts.given if facts is not None else ():
        first, last = call.spreads
        if len(last) < AT_LAST:
            continue
        if max(last[-AT_LAST:]) < min(MAX_SPREAD, LOST * max(first)):
            yield run.finding(
                run.last_step,
                symptom=f"the spread of representations fell from {max(first):.2g} to {last[-1]:.2g}: all samples have "
                "nearly the same",
                where=where_of(call),
                evidence=[("spread of the directions of a batch", last[-1], round(max(first), 3))],
            )
            return
        yield Passed(f"representations with a spread of {last[-1]:.2g}")
