"""Measures the loss of the batch twice over that of the batch: 1 for a mean over samples, 2 for a sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor, nn

from trainwright.doctor.loss.facts import CutFacts, CutLoss, TermRatio
from trainwright.doctor.loss.measure.players import GameProgram
from trainwright.doctor.loss.measure.terms import alone, size_of_gradient
from trainwright.recorder.program import Backward, Call, Constant, Operation, RecordedStep, constants_of, mapped
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.terms import Term, terms_of
from trainwright.runlog.json_values import Facts, strict

MOST_TERMS = 4
QUOTIENTS = ("div", "divide", "truediv")
LEFT_OUT = (0, -100)
"""Values that a loop gives to targets that do not count."""
EXACT = 1e-6
"""Relative: a number is the sum of a mask."""


@experiment(CutFacts.experiment, when="requested", memory=2.0)
def batch_twice(session: ReplaySession) -> Facts:
    """The loss of the batch twice over that of the batch, and the same of each of its terms."""
    if session.size is None:
        raise NotReplayable("the step has no batch")
    steps = list(_by_loss(session))
    if not steps:
        raise NotReplayable("the step has several losses")
    return dict(strict(vars(CutFacts(tuple(_cut(session, each, session.size) for each in steps)))))


def _by_loss(session: ReplaySession) -> Iterator[RecordedStep]:
    """The step with each of its losses alone; nothing where several of them are used by the same optimizer."""
    recorded = session.recorded_step
    if len(recorded.losses) == 1:
        yield recorded
        return
    passes = GameProgram(session).passes()
    known = [each.players for each in passes if each is not None]
    if len(known) < len(passes) or any(one & two for one, two in combinations(known, 2)):
        return
    backward = [each for each in recorded.program if isinstance(each, Backward)]
    for own in backward:
        program = [each for each in recorded.program if not isinstance(each, Backward) or each is own]
        yield replace(recorded, program=program)


def _cut(session: ReplaySession, recorded: RecordedStep, size: int) -> CutLoss:
    counts = _counts(recorded, size)
    more = _twice(recorded, size, counts)
    pairs = list(zip(terms_of(recorded), terms_of(more)))
    ratios = [
        TermRatio(one.name, one.weight, *_of_term(session, (recorded, one), (more, two)))
        for one, two in (pairs if 1 < len(pairs) <= MOST_TERMS else [])
        if one.own
    ]
    return CutLoss(_ratio(session, recorded, more), tuple(ratios), _divides(recorded, size, counts))


def _of_term(
    session: ReplaySession, once: tuple[RecordedStep, Term], twice: tuple[RecordedStep, Term]
) -> tuple[float, float]:
    """The ratio with its weight, which may be one over a number that the loop has counted; and the norm of the gradient
    of the term.
    """
    ratio = _ratio(session, alone(*once), alone(*twice))
    with session.live():
        return twice[1].own / once[1].own * ratio, size_of_gradient(session, once[1], once[0])


def _ratio(session: ReplaySession, once: RecordedStep, twice: RecordedStep) -> float:
    """The loss of a step with its batch twice over its loss with it once."""
    one, two = _loss(session, once), _loss(session, twice)
    return two / one if one else math.nan


def _loss(session: ReplaySession, recorded: RecordedStep) -> float:
    with session.live():
        result = session.replayer.run(recorded, Intervention(mode="eval"), upto="forward")
    if result.error is not None:
        raise result.error
    return result.loss


def _twice(recorded: RecordedStep, size: int, counts: list[float]) -> RecordedStep:
    """The step with each row of its batch twice, and twice the number in place of each that the loop has counted."""

    def two_of(leaf: object) -> object:
        if not isinstance(leaf, Constant) or isinstance(leaf.tensor, nn.Parameter) or not leaf.is_unchanged:
            return leaf
        if _is_of_batch(leaf.tensor, size):
            tensor = torch.cat([leaf.tensor, leaf.tensor])
        elif _is_count(leaf.tensor, counts):
            tensor = leaf.tensor * 2
        else:
            return leaf
        return Constant(tensor, tensor._version)

    program = [
        replace(each, args=mapped(each.args, two_of), kwargs=mapped(each.kwargs, two_of))
        if isinstance(each, Call | Operation)
        else each
        for each in recorded.program
    ]
    return replace(recorded, program=program)


def _is_of_batch(tensor: Tensor, size: int) -> bool:
    """Whether a tensor has a row for each sample, or several."""
    return bool(tensor.dim()) and tensor.shape[0] >= size and int(tensor.shape[0]) % size == 0


def _counts(recorded: RecordedStep, size: int) -> list[float]:
    """What the loop may count in this batch: the sums of its masks, and its targets without those that do not count.

    The loop counts before the loss is computed, so a count is a constant of one batch there.
    """
    counts = [count for tensor in _of_batch(recorded, size) for count in _counts_in(tensor)]
    return [each for each in counts if each > 1]


def _of_batch(recorded: RecordedStep, size: int) -> Iterator[Tensor]:
    for each in recorded.program:
        if isinstance(each, Call | Operation):
            yield from (c.tensor for c in constants_of((each.args, each.kwargs)) if _is_of_batch(c.tensor, size))


def _counts_in(tensor: Tensor) -> list[float]:
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        is_mask = bool(((tensor == 0) | (tensor == 1)).all())
        return [float(tensor.sum())] if is_mask else []
    return [float((tensor != value).sum()) for value in LEFT_OUT]


def _is_count(tensor: Tensor, counts: list[float]) -> bool:
    return tensor.numel() == 1 and any(abs(float(tensor) - each) <= EXACT * each for each in counts)


def _divides(recorded: RecordedStep, size: int, counts: list[float]) -> bool:
    """Whether the loss is divided by something that may be the number of samples, or of targets that count.

    So may be any number that the whole loss is divided by, but for the number of micro-batches: the sum of the weights
    of its samples.
    """
    backward = [each for each in recorded.program if isinstance(each, Backward)]
    if any(by > 1 and by != len(backward) for each in backward for by in _divisors(recorded, each)):
        return True
    return any(
        _may_count(each, size, counts)
        for op in recorded.program
        if isinstance(op, Operation) and op.name.strip("_") in (*QUOTIENTS, "mul", "rmul")
        for each in op.args
    ) or any(_is_by_counted(each, counts) for each in recorded.program if isinstance(each, Operation))


def _divisors(recorded: RecordedStep, backward: Backward) -> Iterator[float]:
    """The number that this loss itself is the quotient by, if it is one."""
    for each in recorded.program:
        if isinstance(each, Operation) and backward.slot in each.outputs and each.name.strip("_") in QUOTIENTS:
            by = each.args[-1].tensor if isinstance(each.args[-1], Constant) else each.args[-1]
            if isinstance(by, int | float) or (isinstance(by, Tensor) and by.numel() == 1):
                yield float(by)


def _is_by_counted(operation: Operation, counts: list[float]) -> bool:
    """Whether it divides by a number that left torch: of the targets that count, or 1 where hardly one does."""
    by = operation.args[-1] if operation.args and operation.name.strip("_") in QUOTIENTS else None
    return isinstance(by, int | float) and (by == 1 or by in counts)


def _may_count(value: object, size: int, counts: list[float]) -> bool:
    """Whether it is the number of samples, of several for each, or one over that; or a count made of the batch that is
    not known to be twice as large where the batch is.
    """
    if isinstance(value, Constant):
        is_one = value.tensor.numel() == 1 and not _is_count(value.tensor, counts)
        return is_one and abs(float(value.tensor)) > 1
    if not isinstance(value, int | float) or value in (0, 1, -1):
        return False
    return abs(value) % size == 0 or abs(1 / value) % size < 1e-6
