"""Scores of candidates among which the target has the largest or the least: what is counted of its rank then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trainwright.doctor.data.measure.asked import OVERLAP, PLAIN
from trainwright.recorder.figure_program import Change, FigureCall, FigureProgram, leaves_of, name_of
from trainwright.recorder.program import Slot

RISING = frozenset({"masked_fill", "where", "float", "double", "to", "cpu", "detach", "clone", "sigmoid", "softmax"})
RISING |= {"log_softmax", "logsigmoid", "contiguous", "view", "reshape"}
"""Functions after which the larger of two outputs is the larger, but for those that a mask puts away."""
COUNTING = (PLAIN - OVERLAP) | RISING | {"gather", "getitem"}
FAR = 10.0
"""By which the score of the target is larger or smaller than any other."""


def ranked(program: FigureProgram) -> tuple[dict[int, Tensor], dict[int, tuple[int, int]]]:
    """The column of the target in each row, by slot of an output whose scores are counted that are larger than that of
    the target, as ``(scores > scores.gather(1, target)).sum(1)`` does; and which call and which output each slot is.
    """
    slots = program.output_slots
    places = {s: (call, n) for call, of in enumerate(slots) for n, s in enumerate(of)}
    gathered = {slot: (scores, index) for slot, scores, index in _gathered(program.calls)}
    targets: dict[int, Tensor] = {}
    for more, less in _compared(program.calls):
        scores, index = gathered.get(less, (-1, None))
        if index is None:
            continue
        output = next((s for s in places if _is_rising(program, more, s) and _is_rising(program, scores, s)), None)
        if output is not None and _is_one_a_row(program.outputs[places[output][0]][places[output][1]], index):
            targets[output] = index
    return targets, places


def rank_changes(
    program: FigureProgram, targets: Mapping[int, Tensor], places: Mapping[int, tuple[int, int]]
) -> tuple[Change, Change]:
    """To scores of which that of the target is far the largest, and far the least."""
    by_place = {places[slot]: index for slot, index in targets.items()}

    def put(sign: float) -> Change:
        def change(call: int, outputs: Sequence[Tensor]) -> list[Tensor]:
            return [
                _with_extreme(each, by_place[call, n], sign) if (call, n) in by_place else each
                for n, each in enumerate(outputs)
            ]

        return change

    return put(1.0), put(-1.0)


def counts_ranks(calls: Sequence[FigureCall]) -> bool:
    """Whether these functions do nothing else than to count ranks."""
    return {name_of(each) for each in calls} <= COUNTING


def _with_extreme(scores: Tensor, index: Tensor, sign: float) -> Tensor:
    known = scores[scores.isfinite()]
    most = (known.max() if sign > 0 else known.min()) + sign * FAR
    return scores.scatter(1, index, most.expand_as(index).to(scores))


def _gathered(calls: Sequence[FigureCall]) -> Iterator[tuple[int, int, Tensor]]:
    """Slots, the scores that they are taken from along the columns, and the columns."""
    for call in calls:
        leaves = leaves_of(call)
        if name_of(call) == "gather" and len(leaves) == 3:
            scores, axis, index = leaves
            if isinstance(scores, Slot) and axis in (1, -1) and isinstance(index, Tensor):
                yield call.slots[0], scores.number, index


def _compared(calls: Sequence[FigureCall]) -> Iterator[tuple[int, int]]:
    """Pairs of slots of which the first is asked to be larger."""
    for call in calls:
        leaves, name = leaves_of(call), name_of(call)
        if len(leaves) == 2 and all(isinstance(each, Slot) for each in leaves):
            first, second = (each.number for each in leaves if isinstance(each, Slot))
            if name in ("gt", "ge"):
                yield first, second
            elif name in ("lt", "le"):
                yield second, first


def _is_rising(program: FigureProgram, slot: int, output: int) -> bool:
    behind = program.calls_behind(slot, {output})
    return behind is not None and all(name_of(each) in RISING for each in behind)


def _is_one_a_row(output: Tensor, index: Tensor) -> bool:
    is_of_scores = output.dim() == 2 and output.shape[1] > 2 and output.is_floating_point()
    return is_of_scores and index.shape == (len(output), 1) and bool(torch.isfinite(output).any())
