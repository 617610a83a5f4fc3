"""Finds terms of a loss that are reduced in another way than their like, by the calls that reduce them."""

from __future__ import annotations

import math

from torch import Tensor, nn

from trainwright.doctor.loss.facts import DividedTerm, SummedTerm
from trainwright.doctor.loss.measure.comparing import BINARY, CLASSES, DISTANCES
from trainwright.recorder.program import Constant, Operation, RecordedStep, Slot, constants_of
from trainwright.replay.replayer import batch_size
from trainwright.replay.session import ReplaySession
from trainwright.replay.substituted import noted
from trainwright.replay.terms import made_of, terms_of

FEW = 4
"""Rows over which a sum is hardly another thing than a mean."""
IGNORED = -100
"""By torch's losses, where nothing else is said."""
WEIGHED = 0.5
"""Relative: sums of weights of samples differ from their number by less."""
MANY = 8
"""Samples: a smaller number may be a weight."""
QUOTIENTS = frozenset({"div", "divide", "truediv"})
ADDED = frozenset({"add", "radd", "sub", "rsub"})


def summed_among_means(recorded: RecordedStep) -> SummedTerm | None:
    """A term with ``reduction="sum"`` that no factor makes up for, beside one with ``reduction="mean"``.

    Its weight would have to be smaller by the number of rows that count, or of targets; what is nearer to that than to
    1 is on purpose: boxes are summed over their corners and averaged over the objects. So is a sum that the whole loss
    is divided by the rows of: a mean beside it is then weighed by their number.
    """
    makers = _makers(recorded)
    terms = [(term, makers[term.slot]) for term in terms_of(recorded) if term.slot in makers]
    means = [abs(term.own) for term, op in terms if _reduction(op) == "mean" and term.own]
    sums = [(term, op, _rows(op)) for term, op in terms if _reduction(op) == "sum"]
    for term, op, rows in sums:
        is_mean = math.isclose(abs(term.weight) * rows, 1.0, rel_tol=WEIGHED)
        if means and not is_mean and rows >= FEW and abs(term.own) * math.sqrt(rows) > max(means):
            return SummedTerm(term.name, _targets(op))
    return None


def divided_among_means(recorded: RecordedStep) -> DividedTerm | None:
    """A mean that is divided by the number of samples again, beside one that is not.

    The number must be a whole one that the loop divides by: a weight is seldom just that.
    """
    size, makers = batch_size(recorded) or 0, _makers(recorded)
    means = [term for term in terms_of(recorded) if term.slot in makers and _is_mean(makers[term.slot])]
    divided = {
        each.args[0].number
        for each in makers.values()
        if each.name.strip("_") in QUOTIENTS
        and isinstance(each.args[0], Slot)
        and type(each.args[-1]) is int
        and each.args[-1] == size >= MANY
    }
    bad = [term for term in means if term.slot in divided]
    return DividedTerm(bad[0].name, size) if bad and len(bad) < len(means) else None


def added_to_rows(session: ReplaySession) -> int:
    """Of how many rows a sum over all that a model returns is added to a number for each: beside sums of one row each
    that of all rows grows with the batch. 0 where there is none.
    """
    recorded = session.recorded_step
    makers = _makers(recorded)
    sums = {
        n: each.args[0].number for n, each in makers.items() if _is_sum_of_all(each) and _is_of_outputs(recorded, n)
    }
    beside = [(source, other) for total, source in sums.items() for other in _added_to(total, makers)]
    if not beside:
        return 0
    seen: dict[int, Tensor] = {}
    wanted = {slot for source, other in beside for slot in (source, other) if isinstance(slot, int)}
    with session.live():
        session.replayer.run(noted(recorded, sorted(wanted), seen.__setitem__), upto="forward")
    for source, other in beside:
        rows = seen.get(other) if isinstance(other, int) else other
        if source in seen and rows is not None and _are_rows_of(seen[source], rows.detach()):
            return len(rows)
    return 0


def _are_rows_of(source: Tensor, rows: Tensor) -> bool:
    """Whether these are a number for each row of it, and not all the same."""
    is_one_each = source.dim() > 1 and rows.shape[:1] == source.shape[:1] == (rows.numel(),)
    return is_one_each and len(rows) >= FEW and bool((rows != rows.flatten()[0]).any())


def _is_sum_of_all(operation: Operation) -> bool:
    return (
        operation.name == "sum"
        and len(operation.args) == 1
        and isinstance(operation.args[0], Slot)
        and not any(operation.kwargs.values())
    )


def _is_of_outputs(recorded: RecordedStep, slot: int) -> bool:
    """Whether a value is made of what a model returned, and of no weight."""
    operations = made_of(recorded, slot)
    outputs = {n for each in recorded.calls for n in each.outputs}
    constants = [c.tensor for each in operations for c in constants_of((each.args, each.kwargs))]
    slots = {each.number for op in operations for each in op.args if isinstance(each, Slot)}
    return bool(slots & outputs) and not any(isinstance(each, nn.Parameter) for each in constants)


def _added_to(slot: int, makers: dict[int, Operation]) -> list[int | Tensor]:
    """The other summands of the sums and differences that a value is a part of."""
    found: list[int | Tensor] = []
    for each in makers.values():
        if each.name.strip("_") in ADDED and Slot(slot) in each.args and not each.in_place:
            others = [value for value in each.args if value != Slot(slot)]
            found += [value.number for value in others if isinstance(value, Slot)]
            found += [value.tensor for value in others if isinstance(value, Constant)]
    return found


def _makers(recorded: RecordedStep) -> dict[int, Operation]:
    return {n: each for each in recorded.program if isinstance(each, Operation) for n in each.outputs}


def _is_mean(operation: Operation) -> bool:
    whole = operation.name == "mean" and len(operation.args) == 1 and not operation.kwargs
    return whole or _reduction(operation) == "mean"


def _reduction(operation: Operation) -> object:
    is_loss = operation.name in CLASSES | BINARY | DISTANCES
    return operation.kwargs.get("reduction", "mean") if is_loss else None


def _largest(operation: Operation) -> Tensor | None:
    """The largest constant among the arguments; None where targets are not constant."""
    constants = [each.tensor for each in constants_of((operation.args, operation.kwargs))]
    return max(constants, key=Tensor.numel, default=None)


def _targets(operation: Operation) -> int:
    targets = _largest(operation)
    return 0 if targets is None else targets.numel()


def _rows(operation: Operation) -> int:
    """Of the targets, without those that are ignored."""
    targets = _largest(operation)
    if targets is None or not targets.dim():
        return 0
    if targets.dim() > 1 or targets.is_floating_point():
        return len(targets)
    return int((targets != operation.kwargs.get("ignore_index", IGNORED)).sum())
