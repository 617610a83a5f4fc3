"""Detects changes of the program of a loop, which are a reason to examine a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from trainwright.recorder.graph import MAX_NODES, graph_behind
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import (
    Backward,
    Call,
    ClipGradients,
    Instruction,
    Operation,
    OptimizerStep,
    RecordedStep,
    Slot,
)
from trainwright.recorder.user_types import Kwargs

MOST = 16
"""Steps are not compared after this many programs: such a loop chooses its program at random or by its data."""
_LARGEST_DIMENSION = 8
"""Integers up to this one may be dimensions and belong to the program. Larger ones are sizes that vary by batch."""
EARLY, EVERY = 64, 16
"""Every step is compared until step EARLY, later one in EVERY steps."""


class ProgramChanges(Probe):
    """Compares the program of each step with those of earlier steps.

    A program consists of the recorded operations between outputs and loss, the nodes of the autograd graph behind the
    losses, the calls that make and change gradients, the number of writes to each parameter, the modes of the modules,
    and whether the learning rate is 0. A step with a new program gets the value ``changed``.
    """

    name = "program_changes"

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [p for p in parameters if not p.is_inference()]
        self._nodes: list[Hashable] = []
        self._versions: list[int] = []
        self._closed = 0
        self._known: set[int] = set()
        self._is_due = True

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        if self._is_due and len(self._nodes) < MAX_NODES:
            self._nodes += [node.name() for node in graph_behind(losses)]

    def on_begun_again(self) -> None:
        self._nodes = []

    def prepare_next(self, step: int) -> None:
        """Must be called after all work of the watch on ``step``, because replays write to the parameters, too."""
        self._is_due = len(self._known) <= MOST and (step < EARLY or step % EVERY == 0)
        self._nodes = []
        self._versions = [p._version for p in self._parameters] if self._is_due else []

    def on_closed(self, step: RecordedStep) -> None:
        if not self._is_due or step.is_light:
            return
        writes = tuple(p._version - before for p, before in zip(self._parameters, self._versions))
        called = tuple(map(_key_of, step.program))
        key = hash((tuple(self._nodes), writes, step.lr == 0, "edited" in step.values, called))
        self._closed += 1
        # step 1 creates the state of the optimizer, so step 2 differs from it
        if key not in self._known and self._known and self._closed > 2:
            step.values["changed"] = True
        self._known.add(key)


def _key_of(instruction: Instruction) -> Hashable:
    """Returns the part of an instruction that steps of the same program share."""
    if isinstance(instruction, Operation):
        plain = [_plain(value) for value in (*instruction.args, *instruction.kwargs.items())]
        return instruction.name, instruction.with_grad, *plain
    if isinstance(instruction, Call):
        return instruction.root, instruction.part, instruction.training, instruction.wanted, instruction.autocast
    if isinstance(instruction, Backward):
        return instruction.slot is None, instruction.retain, instruction.gradient is None
    if isinstance(instruction, ClipGradients):
        return instruction.by  # the threshold may change with the step
    return type(instruction).__name__, instruction.optimizer if isinstance(instruction, OptimizerStep) else None


def _plain(value: object) -> Hashable:
    """Returns the part of an argument that belongs to the program: no sizes, no numbers that a schedule may change."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    if isinstance(value, slice):
        return _plain((value.start, value.stop, value.step))
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) <= _LARGEST_DIMENSION else "size"
    if value is None or isinstance(value, bool | str | torch.dtype):
        return value
    return "slot" if isinstance(value, Slot) else type(value).__name__
