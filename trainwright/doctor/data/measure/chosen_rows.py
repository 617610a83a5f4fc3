"""Which rows of the outputs are chosen after the call, where every call has the same inputs: the nodes of a graph."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainwright.doctor.data.facts import ChosenRows
from trainwright.recorder.escapes import LOSSES
from trainwright.recorder.figure_program import FigureProgram, compared_by, leaves_of, name_of
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.program import Call, Constant, Operation, RecordedStep, Slot, constants_of

CHOOSING = frozenset({"getitem", "index_select"})
ROW_BY_ROW = frozenset({"argmax", "softmax", "log_softmax", "sigmoid", "exp", "detach", "cpu", "float", "squeeze"})
"""Functions with a row of their own for each row of an output."""
COMPARING = LOSSES | {"eq", "ne"}
STEPS = 16
"""Steps that are read: a mask is the same in each."""
Chosen = tuple[Tensor, Tensor]
"""The rows that are chosen, and the target of each."""


class RowsChosen:
    """Reads some steps, then evaluations. Holds the targets that were trained on, a number for each row."""

    def __init__(self) -> None:
        self._inputs: list[weakref.ref[Tensor]] = []
        self._targets: Tensor | None = None
        self._steps = 0
        self._told: dict[tuple[int, int], ChosenRows] = {}

    def train(self, step: RecordedStep) -> None:
        """What a step has chosen of the outputs of its calls, and compared by a loss."""
        if self._steps >= STEPS or not step.calls:
            return
        self._steps += 1
        inputs = _given(step.calls[0])
        if self._steps == 1:
            self._inputs = [weakref.ref(each) for each in inputs]
        elif not self._are_known(inputs):
            self._steps, self._inputs = STEPS, []
        for rows, targets in _chosen_in(step) if self._inputs else ():
            self._learn(rows, targets.double())

    def _learn(self, rows: Tensor, targets: Tensor) -> None:
        size = int(rows.max()) + 1 if self._targets is None else max(len(self._targets), int(rows.max()) + 1)
        known = torch.full((size,), torch.nan, dtype=torch.float64)
        if self._targets is not None:
            known[: len(self._targets)] = self._targets
        known[rows] = targets
        self._targets = known

    def _are_known(self, inputs: Sequence[Tensor]) -> bool:
        """Whether one of them is the very tensor that training has given: then a row is the same thing in both."""
        known = [each() for each in self._inputs]
        return any(one is other for one in inputs for other in known)

    def evaluate(self, program: FigureProgram, inputs: Sequence[Tensor]) -> tuple[ChosenRows, ...]:
        """What all evaluations so far have chosen, each choice once."""
        if self._targets is not None and self._are_known(plain(inputs)):
            for size, rows, targets in _chosen_by(program):
                one = self._compared(size, rows, targets.double())
                self._told[one.rows, one.shared] = one
        return tuple(self._told.values())

    def _compared(self, size: int, rows: Tensor, targets: Tensor) -> ChosenRows:
        assert self._targets is not None
        known = torch.full((max(size, len(self._targets)),), torch.nan, dtype=torch.float64)
        known[: len(self._targets)] = self._targets
        trained = ~known.isnan()
        return ChosenRows(
            size=size,
            trained=int(trained.sum()),
            rows=len(rows),
            shared=int(trained[rows].sum()),
            alike=int((known[rows] == targets).sum()),
        )


def _given(call: Call) -> list[Tensor]:
    """The inputs that say what a row is."""
    known = [each.tensor for each in constants_of((call.args, call.kwargs)) if each.is_unchanged]
    return [each for each in plain(known) if each.dim() > 1]


def _chosen_in(step: RecordedStep) -> Iterator[Chosen]:
    outputs = {slot for call in step.calls for slot in call.outputs}
    chosen: dict[int, Tensor] = {}
    for each in step.program:
        first = each.args[0] if isinstance(each, Operation) and each.args else None
        if not isinstance(each, Operation) or not isinstance(first, Slot):
            continue
        name, last = each.name.strip("_"), each.args[-1]
        if name in ROW_BY_ROW and first.number in outputs:
            outputs.add(each.outputs[0])
        elif name in CHOOSING and first.number in outputs:
            rows = _rows_of(last.tensor if isinstance(last, Constant) else last)
            if rows is not None:
                chosen[each.outputs[0]] = rows
        elif name in ROW_BY_ROW and first.number in chosen:
            chosen[each.outputs[0]] = chosen[first.number]
        elif name in LOSSES and first.number in chosen:
            rows, targets = chosen[first.number], constants_of(each.args[1:2])
            if targets and targets[0].tensor.shape == rows.shape:
                yield rows, targets[0].tensor.cpu()


def _chosen_by(program: FigureProgram) -> Iterator[tuple[int, Tensor, Tensor]]:
    """How many rows the output has, those that are chosen, and their targets."""
    sizes = {
        slot: len(value)
        for slots, outputs in zip(program.output_slots, program.outputs)
        for slot, value in zip(slots, outputs)
        if value.dim()
    }
    for call in program.calls:
        leaves = leaves_of(call)
        first = leaves[0] if leaves else None
        if not isinstance(first, Slot) or first.number not in sizes:
            continue
        if name_of(call) in ROW_BY_ROW:
            sizes |= dict.fromkeys(call.slots, sizes[first.number])
        elif name_of(call) in CHOOSING:
            rows = _rows_of(leaves[-1])
            targets = None if rows is None else _compared_with(program, call.slots[0], rows.shape)
            if rows is not None and targets is not None:
                yield sizes[first.number], rows, targets


def _compared_with(program: FigureProgram, chosen: int, shape: torch.Size) -> Tensor | None:
    """The first targets of this shape that something is compared with which is made of this slot alone."""
    for slot, targets in compared_by(program.calls, COMPARING):
        if targets.shape == shape and program.calls_behind(slot, {chosen}) is not None:
            return targets.cpu()
    return None


def _rows_of(index: object) -> Tensor | None:
    """The numbers of the rows that an index of one dimension chooses."""
    if not isinstance(index, Tensor) or index.dim() != 1 or index.is_floating_point():
        return None
    rows = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
    return rows.cpu() if len(rows) and bool((rows >= 0).all()) else None
