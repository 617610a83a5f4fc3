"""Measures the loss of the batch twice over that of the batch: 1 for a mean over samples, 2 for a sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from trainwright.doctor.loss.facts import CutFacts, TermRatio
from trainwright.doctor.loss.measure.scores import alone
from trainwright.recorder.program import Call, Constant, Operation, RecordedStep, constants_of, mapped
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import change_leaves
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.terms import Term, terms_of
from trainwright.runlog.json_values import Facts, strict

MOST_TERMS = 4
LEFT_OUT = (0, -100)
"""Values that a loop gives to targets that do not count."""
EXACT = 1e-6
"""Relative: a number is the sum of a mask."""


@experiment(CutFacts.experiment, when="requested", memory=2.0)
def batch_twice(session: ReplaySession) -> Facts:
    """The loss of the batch twice over that of the batch, and the same of each of its terms."""
    size, recorded = session.size, session.recorded_step
    if size is None or len(recorded.losses) != 1:
        raise NotReplayable("the step has no batch, or several losses")
    counts = _counts(recorded, size)
    more = _with_counts_twice(recorded, counts)
    pairs = list(zip(terms_of(recorded), terms_of(more)))
    ratios = [
        TermRatio(
            one.name, one.weight, two.own / one.own * _ratio(session, alone(recorded, one), alone(more, two), size)
        )
        for one, two in (pairs if 1 < len(pairs) <= MOST_TERMS else [])
        if one.own
    ]
    facts = CutFacts(_ratio(session, recorded, more, size), tuple(ratios), _divides(recorded, size, counts))
    return dict(strict(vars(facts)))


def _of_term(
    session: ReplaySession, once: tuple[RecordedStep, Term], twice: tuple[RecordedStep, Term], size: int
) -> float:
    """With its weight, which may be one over a number that the loop has counted."""
    return twice[1].own / once[1].own * _ratio(session, alone(*once), alone(*twice), size)


def _ratio(session: ReplaySession, once: RecordedStep, twice: RecordedStep, size: int) -> float:
    """The loss of a step with its batch twice over its loss with it once."""

    def double(leaf: object) -> object:
        return two_of(leaf) if isinstance(leaf, Tensor) else leaf

    def two_of(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor]) if _is_of_batch(tensor, size) else tensor

    losses = []
    changed = Intervention(mode="eval", inputs=change_leaves(double), constants=two_of)
    for recorded, change in ((once, Intervention(mode="eval")), (twice, changed)):
        with session.live():
            result = session.replayer.run(recorded, change, upto="forward")
        if result.error is not None:
            raise result.error
        losses.append(result.loss)
    return losses[1] / losses[0] if losses[0] else math.nan


def _with_counts_twice(recorded: RecordedStep, counts: list[float]) -> RecordedStep:
    """The step with twice the number in place of each that the loop has counted in its batch."""

    def two_of(leaf: object) -> object:
        if not isinstance(leaf, Constant) or not _is_count(leaf.tensor, counts):
            return leaf
        tensor = leaf.tensor * 2
        return Constant(tensor, tensor._version)

    program = [
        replace(each, args=mapped(each.args, two_of), kwargs=mapped(each.kwargs, two_of))
        if isinstance(each, Operation)
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
    """Whether the loss is divided by something that may be the number of samples, or of targets that count."""
    return any(
        _may_count(each, size, counts)
        for op in recorded.program
        if isinstance(op, Operation) and op.name.strip("_") in ("div", "divide", "truediv", "mul", "rmul")
        for each in op.args
    )


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
