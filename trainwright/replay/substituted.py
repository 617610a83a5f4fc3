"""A recorded step with a value of one's own in place of one that its program makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from trainwright.recorder.program import Backward, Call, Instruction, Operation, RecordedStep, Slot, mapped
from trainwright.recorder.tape import autocast_now


def to_first_loss(recorded: RecordedStep) -> RecordedStep:
    """The step up to its first backward pass."""
    end = next((n for n, each in enumerate(recorded.program) if isinstance(each, Backward)), 0)
    return replace(recorded, program=recorded.program[: end + 1])


def with_values(recorded: RecordedStep, values: Mapping[int, Tensor]) -> RecordedStep:
    """The step up to its first loss, with these values in slots, and without what is needed for them alone: where all
    that the loss is made of is given, no model is called.
    """
    program: list[Instruction] = []
    for each in to_first_loss(recorded).program:
        made = _made(each)
        if not made or not set(made) <= values.keys():
            program.append(each)
        program += [_made_by(partial(values.__getitem__, slot), (), [slot]) for slot in made if slot in values]
    return replace(recorded, program=_needed(program))


def noted(recorded: RecordedStep, slots: Sequence[int], note: Callable[[int, Tensor], object]) -> RecordedStep:
    """The step up to its first loss, with a call of ``note`` for each of these slots before that is used."""

    def of(slot: int) -> Callable[[Tensor], Tensor]:
        def pass_on(tensor: Tensor) -> Tensor:
            note(slot, tensor)
            return tensor

        return pass_on

    *before, backward = to_first_loss(recorded).program
    notes: list[Instruction] = [_made_by(of(slot), (Slot(slot),), []) for slot in slots]
    return replace(recorded, program=[*before, *notes, backward])


def _made_by(function: Callable[..., Tensor], args: tuple[Slot, ...], outputs: list[int]) -> Operation:
    return Operation("value", function, args, {}, autocast_now("cpu"), outputs)


def _made(instruction: Instruction) -> list[int]:
    return list(instruction.outputs) if isinstance(instruction, Call | Operation) else []


def _needed(program: list[Instruction]) -> list[Instruction]:
    """Those instructions that the last one, a backward pass, needs."""
    needed: set[int] = set()
    kept: list[Instruction] = []
    for each in reversed(program):
        if isinstance(each, Call | Operation):
            in_place = isinstance(each, Operation) and each.in_place and each.args[:1]
            written = {each.args[0].number} if in_place and isinstance(each.args[0], Slot) else set()
            if needed.isdisjoint({*each.outputs, *written}):
                continue
            needed |= _read((each.args, each.kwargs))
            needed -= set() if written else set(each.outputs)
        elif isinstance(each, Backward):
            needed |= set() if each.slot is None else {each.slot}
        kept.append(each)
    return kept[::-1]


def _read(value: object) -> set[int]:
    found: set[int] = set()
    mapped(value, lambda leaf: found.add(leaf.number) if isinstance(leaf, Slot) else None)
    return found
