"""Finds a loss that is summed among terms that are means, by the arguments of its call."""

from __future__ import annotations

import math

from trainwright.doctor.loss.facts import SummedTerm
from trainwright.doctor.loss.measure.comparing import BINARY, CLASSES, DISTANCES
from trainwright.recorder.program import Operation, RecordedStep, constants_of
from trainwright.replay.terms import terms_of

FEW = 4
"""Targets over which a sum is hardly another thing than a mean."""


def summed_among_means(recorded: RecordedStep) -> SummedTerm | None:
    """A term with ``reduction="sum"`` that no factor makes up for, beside one with ``reduction="mean"``.

    Its weight would have to be smaller by the number of targets; what is nearer to that than to 1 is on purpose.
    """
    makers = {n: each for each in recorded.program if isinstance(each, Operation) for n in each.outputs}
    terms = [(term, makers[term.slot]) for term in terms_of(recorded) if term.slot in makers]
    means = [abs(term.own) for term, op in terms if _reduction(op) == "mean" and term.own]
    sums = [(term, _targets(op)) for term, op in terms if _reduction(op) == "sum"]
    for term, targets in sums:
        if means and targets >= FEW and abs(term.own) * math.sqrt(targets) > max(means):
            return SummedTerm(term.name, targets)
    return None


def _reduction(operation: Operation) -> object:
    is_loss = operation.name in CLASSES | BINARY | DISTANCES
    return operation.kwargs.get("reduction", "mean") if is_loss else None


def _targets(operation: Operation) -> int:
    """The largest constant among the arguments; 0 where targets are not constant."""
    return max((each.tensor.numel() for each in constants_of((operation.args, operation.kwargs))), default=0)
