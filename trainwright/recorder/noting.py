"""Resting steps, noted in as few calls as can be: what was noted becomes a program when somebody reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.recorder.gradients import have_gradients
from trainwright.recorder.listener import inside
from trainwright.recorder.numbers import Numbers, begin_reading
from trainwright.recorder.program import (
    Backward,
    Call,
    ClipGradients,
    Instruction,
    OptimizerStep,
    RecordedStep,
    ZeroGrad,
)
from trainwright.recorder.recording import LONGEST, LoopRecorder, hyperparameters
from trainwright.recorder.tape import autocast_now
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.runlog.json_values import Event

Note: TypeAlias = tuple[Any, ...]
"""The function that writes it down, and what that takes besides the step."""


class NotedStep(RecordedStep):
    """Its ``program`` and ``events`` are made of ``notes`` when they are read; those of most resting steps never are.

    It holds as few objects as can be: Python's garbage collector goes through all that are new.
    """

    __slots__ = ("_calls", "_events", "_program", "loss_sum", "notes")

    notes: list[Note]
    loss_sum: float
    """Of the losses that were noted."""
    _program: list[Instruction] | None
    _events: list[Event] | None
    _calls: list[Call]
    """Those that were noted: several probes ask for them."""

    def __init__(self, step: int, **known: Any) -> None:
        if known:
            super().__init__(step, **known)
            return
        self.step, self.notes, self.ids, self.losses, self.values, self._calls = step, [], [], [], {}, []
        self._program = self._events = self.loss = self.grad_norm = self.blind = None
        self.trained = (0, 0)
        self.lr = self.ended_s = self.loss_sum = 0.0
        self.num_bytes, self.is_told_late, self.is_light = 0, False, False

    @property
    def program(self) -> list[Instruction]:
        return self._written()[0]

    @program.setter
    def program(self, value: list[Instruction]) -> None:
        self._program, self.notes, self.loss_sum = value, [], 0.0

    @property
    def events(self) -> list[Event]:
        return self._written()[1]

    @events.setter
    def events(self, value: list[Event]) -> None:
        self._events = value

    def _written(self) -> tuple[list[Instruction], list[Event]]:
        if self._program is None or self._events is None:
            self._program, self._events = [], []
        if self.notes:
            notes, self.notes = self.notes, []
            for write, *values in notes:
                write(self._program, self._events, *values)
        return self._program, self._events

    def note_call(self, call: Call, is_training: bool) -> None:
        self.notes.append((_write_call, call, is_training))
        self._calls.append(call)

    def _noted(self, write: Callable[..., None], at: int = 1) -> list[Any]:
        """What notes of this kind hold at that place."""
        return [note[at] for note in self.notes if note[0] is write]

    @property
    def calls(self) -> list[Call]:
        """Without writing anything down: most readers want no more."""
        return self._calls if self._program is None else super().calls

    @property
    def updates(self) -> list[OptimizerStep]:
        return self._noted(_write_update) if self._program is None else super().updates

    @property
    def kinds(self) -> list[str]:
        if self._events is not None:
            return super().kinds
        return [kind for write, *_ in self.notes if (kind := _KINDS.get(write)) is not None]

    @property
    def is_noted(self) -> bool:
        """Whether all of it was noted, and nothing of it is written down yet."""
        return self._program is None and bool(self.losses) and self.grad_norm is not None

    @property
    def are_finite(self) -> bool:
        """Whether its numbers are, of one that was noted."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm or 0.0)

    def numbers(self) -> Numbers:
        """Of one that was noted. They stay what they are when it is written down."""
        if self._program is not None:
            return begin_reading(self)()
        losses = (self.loss_sum,) if len(self.losses) == 1 else tuple(self._noted(_write_backward, 3))
        clips = tuple([found for found in self._noted(_write_clip, 4) if found is not None])
        return Numbers.of(losses, self.loss_sum / len(losses), float(self.grad_norm or 0.0), clips)


class NotingRecorder(LoopRecorder):
    """While it rests, it notes what a plain step does on a CPU. Anything else it records, and the rest of that step.

    While ``is_light``, it records losses and updates alone: nothing is called at a forward pass, and no operation is
    seen.
    """

    current: NotedStep
    is_light = False

    def set_light(self, is_light: bool) -> None:
        """Set whether the step that begins now, and those after it, are light."""
        self.is_light = is_light
        self.tape.stop()
        self._begin_step(self.current.step)

    def _begin_step(self, number: int) -> None:
        self.current = NotedStep(number)
        if self.is_light:
            self.current.program, self.current.events, self.current.is_light = [], [], True
        self._is_plain = self._can_note

    @cached_property
    def _can_note(self) -> bool:
        return self.device.type == "cpu" and not self._has_others

    @cached_property
    def _zero_grads(self) -> dict[int, Note]:
        """The note of each optimizer and each root, by identity."""
        of_roots: dict[int, Note] = {id(root): (_write_zero_grad, None) for root in self.roots}
        return of_roots | {key: (_write_zero_grad, index) for key, index in self._index_of.items()}

    @cached_property
    def _updates(self) -> list[Note | None]:
        """The last note of each optimizer: the next one is the same while rates and betas are."""
        return [None] * len(self.optimizers)

    @cached_property
    def _index_of(self) -> dict[int, int]:
        """Optimizers by identity."""
        return {id(each): index for index, each in enumerate(self.optimizers)}

    def on_zero_grad(self, owner: Optimizer | nn.Module) -> None:
        if self.is_light:
            return
        note = self._zero_grads.get(id(owner))
        if not (self.is_resting and self._is_plain) or note is None or self._unused.are_there:
            super().on_zero_grad(owner)
            return
        self._versions = None
        if len(self.optimizers) > 1:
            self._carried.on_zero_grad(note[1])
        self.current.notes.append(note)

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        tape, step = self.tape, self.current
        if not (self.is_resting and self._is_plain) or len(step.notes) > LONGEST or tape.num_bytes > self.budget_bytes:
            super().on_forward(root, args, kwargs)
            return
        if tape.pushed:
            tape.stop()
        if self._unused.reads.pushed:
            self._unused.reads.stop()
        tape.is_resting = self._state.is_resting = True
        if self._fetched.batches:
            step.ids.append(self._fetched.take((args, kwargs)))
        if tape.operations:
            step.notes.append((_write_operations, tape.operations))
            tape.operations = []
        plainly = tape.plainly(args, kwargs)
        positional, by_name = plainly or (tape.write(args), tape.write(kwargs))
        rng, (modes, wanted) = self._state.rng(step.step), self._state.modes_and_wanted()
        index, part = self._root_of[id(root)], self._paths[id(root)]
        self._call = call = Call(
            index, positional, by_name, rng, modes, autocast_now("cpu"), [], len(step.ids) - 1, part, wanted
        )
        call.held = None if plainly else self._held_by(args, kwargs)
        step.note_call(call, root.training)

    def on_backward(self, losses: tuple[Tensor, ...], options: Kwargs) -> None:
        if self.is_light:
            self.current.losses += [self._scaled_losses.unscaled(each)[0] for each in losses if each.numel() == 1]
            return
        tape, step, loss = self.tape, self.current, losses[0]
        if tape.pushed:
            tape.stop()
        if self._unused.reads.pushed:
            self._unused.reads.stop()
        slot = tape.slot_of(loss) if self.is_resting and self._is_plain and not self._scaled_losses.by_id else None
        is_usual = slot is not None and not tape.leaves and loss.grad_fn is not None and loss.numel() == 1
        is_alone = len(losses) == 1 and not any(map(options.get, ("retain_graph", "create_graph")))
        is_whole = is_alone and options.get("grad_tensors") is None and options.get("inputs") is None
        if not (is_usual and is_whole) or (not step.losses and have_gradients(self.parameters)):
            self._is_plain = False
            super().on_backward(losses, options)
            return
        self._is_foreign = self._retains = False
        if tape.operations:
            step.notes.append((_write_operations, tape.operations))
            tape.operations = []
        value = loss.detach()
        step.losses.append(value)
        step.loss_sum += (number := value.item())
        step.notes.append((_write_backward, slot, value, number))

    def on_clip(
        self, by: str, at: float, parameters: list[Tensor], norm: Tensor | None, function: TorchFunction | None = None
    ) -> None:
        if self.is_light:
            return
        is_plain = self.is_resting and self._is_plain and function is None
        found = norm.item() if is_plain and norm is not None else None
        if not is_plain or not math.isfinite(found or 0.0):
            self._is_plain = False
            super().on_clip(by, at, parameters, norm, function)
            return
        self._versions, self._is_clipped = None, True
        numbers = self._clipped_by(parameters)
        self.current.notes.append((_write_clip, by, at, numbers, found, len(parameters)))
        self._left = None if found is None or by != "norm" else found * min(1.0, at / (found + 1e-6))  # as torch clips

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        step, index = self.current, self._index_of.get(id(optimizer))
        if self.is_light:
            if index is not None:
                update = OptimizerStep(index, list(map(hyperparameters, optimizer.param_groups)))
                step.lr = float(update.groups[0].get("lr", 0.0)) if index == 0 else step.lr
                self._before_update(step, optimizer, None)
                step.program.append(update)
            return
        is_plain = self.is_resting and self._is_plain and not inside.backward
        if index is None or not is_plain or self._edits or self._are_edited():
            self._is_plain = False
            super().on_step(optimizer, args)
            return
        groups = list(map(hyperparameters, optimizer.param_groups))
        if index == 0:
            step.lr = float(groups[0].get("lr", 0.0))
        is_clipped = self._versions is not None and bool(step.notes) and step.notes[-1][0] is _write_clip
        known, autocast = self._updates[index], torch.is_autocast_enabled("cpu")
        scale = getattr(optimizer, "grad_scale", None)
        if known is None or known[1].groups != groups or known[2] != autocast or scale is not None:
            known = self._updates[index] = _write_update, OptimizerStep(index, groups, scale), autocast
        step.notes.append(known)
        self._before_update(step, optimizer, self._left if is_clipped else None)

    def on_stepped(self, optimizer: Optimizer) -> None:
        is_plain = self.is_light or (self.is_resting and self._is_plain)
        if is_plain and len(self.optimizers) == 1 and id(optimizer) in self._index_of:
            self._after_update(self.current, optimizer)
            self.close()
        else:
            super().on_stepped(optimizer)

    def on_gradients(self) -> None:
        if not self.is_light:
            super().on_gradients()

    def on_gradients_changed(self) -> None:
        if not self.is_light:
            super().on_gradients_changed()

    def on_schedule(self, scheduler: object) -> None:
        if self.is_light:
            return
        if self.is_resting and self._is_plain:
            self.current.notes.append((_write_schedule, type(scheduler).__name__))
        else:
            super().on_schedule(scheduler)


Program: TypeAlias = list[Instruction]
Events: TypeAlias = list[Event]


def _write_zero_grad(program: Program, events: Events, optimizer: int | None) -> None:
    program.append(ZeroGrad(optimizer))
    events.append(("zero_grad", -1 if optimizer is None else optimizer))


def _write_call(program: Program, events: Events, call: Call, is_training: bool) -> None:
    program.append(call)
    events.append(("forward", (call.root, is_training, True)))


def _write_operations(program: Program, events: Events, operations: Sequence[Instruction]) -> None:
    program.extend(operations)


def _write_backward(program: Program, events: Events, slot: int, value: Tensor, number: float) -> None:
    program.append(Backward(slot, value))
    events.append(("backward", {"carried": False, "cut": False, "retain": False}))


def _write_clip(
    program: Program, events: Events, by: str, at: float, numbers: list[int], norm: float | None, size: int
) -> None:
    program.append(ClipGradients(by, at, numbers))
    events.append(("clip", {"by": by, "at": at, "norm": norm, "parameters": size}))


def _write_update(program: Program, events: Events, update: OptimizerStep, autocast: bool) -> None:
    program.append(update)
    events.append(("step", {"optimizer": update.optimizer, "autocast": autocast}))


def _write_schedule(program: Program, events: Events, name: str) -> None:
    events.append(("schedule", name))


_KINDS: dict[Callable[..., None], str] = {
    _write_zero_grad: "zero_grad",
    _write_call: "forward",
    _write_backward: "backward",
    _write_clip: "clip",
    _write_update: "step",
    _write_schedule: "schedule",
}
"""Of the events that each writes down."""
