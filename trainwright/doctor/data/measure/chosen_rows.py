"""Which rows of the outputs are chosen after the call, where every call has the same inputs: the nodes of a graph."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainwright.doctor.data.facts import ChosenRows
from trainwright.recorder.comparisons import CHOOSING, ROW_BY_ROW, ComparedRows, chosen_rows, loss_functions
from trainwright.recorder.plain_tensors import plain
from trainwright.recorder.program import Call, Constant, Operation, RecordedStep, Slot, constants_of

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

    def evaluate(self, comparisons: Sequence[ComparedRows], inputs: Sequence[Tensor]) -> tuple[ChosenRows, ...]:
        """What all evaluations so far have chosen, each choice once."""
        if self._targets is not None and self._are_known(plain(inputs)):
            for each in comparisons:
                one = self._compared(each.size, each.rows, each.targets.double())
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
            rows = chosen_rows(last.tensor if isinstance(last, Constant) else last)
            if rows is not None:
                chosen[each.outputs[0]] = rows
        elif name in ROW_BY_ROW and first.number in chosen:
            chosen[each.outputs[0]] = chosen[first.number]
        elif name in loss_functions() and first.number in chosen:
            rows, targets = chosen[first.number], constants_of(each.args[1:2])
            if targets and targets[0].tensor.shape == rows.shape:
                yield rows, targets[0].tensor.cpu()
