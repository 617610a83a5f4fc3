"""What a loop makes of the outputs of a model until numbers leave torch, as instructions that can be run again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trainwright.recorder.plain_tensors import is_dense, num_bytes
from trainwright.recorder.program import Slot, mapped, others_in, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction

BYTES = 64 << 20
"""Of the outputs and of what they are compared with: an evaluation that holds more is not kept."""


MOST_WRITTEN = 1 << 20
"""Bytes of a tensor that is kept as it was before it is written into: sums, counts, a matrix of confusions."""


def _writes(name: str) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__init__"))


@dataclass(frozen=True, slots=True)
class _Output:
    """The outputs of a call, by its number."""

    call: int
    slots: list[int]


@dataclass(frozen=True, slots=True)
class FigureCall:
    """A torch function of what came of outputs. ``writes``: into its first argument.

    In its arguments a Slot stands for each tensor that came of outputs; others are there as they are.
    """

    function: TorchFunction
    args: Args
    kwargs: Kwargs
    slots: list[int]
    writes: bool


@dataclass(frozen=True, slots=True)
class _Number:
    """The tensor of one element whose value left torch, by the number of the escape."""

    slot: int
    escape: int


def leaves_of(call: FigureCall) -> list[object]:
    """Its arguments, and what their containers hold."""
    leaves: list[object] = []
    mapped((call.args, call.kwargs), leaves.append)
    return leaves


def name_of(call: FigureCall) -> str:
    return str(getattr(call.function, "__name__", "?")).strip("_")


def compared_by(calls: Sequence[FigureCall], names: Container[str]) -> Iterator[tuple[int, Tensor]]:
    """Slots, and the tensors that came of no output which they are given beside to a function of these names."""
    for call in calls:
        pair = [*call.args, *call.kwargs.values()][:2]
        if name_of(call) in names and len(pair) == 2:
            for one, other in (pair, pair[::-1]):
                if isinstance(one, Slot) and isinstance(other, Tensor):
                    yield one.number, other


Change: TypeAlias = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
"""The number of a call and its outputs to the outputs that are used."""


Put: TypeAlias = Callable[[int, Tensor], Tensor]
"""A slot and its value to the value that is used."""


def _as_it_is(slot: int, value: Tensor) -> Tensor:
    return value


class FigureProgram:
    """Holds the outputs, and the tensors that functions of them were given, until ``forget``."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.outputs: list[list[Tensor]] = []
        self.parts: set[int] = set()
        self.is_whole = True
        self._slots: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._steps: list[_Output | FigureCall | _Number] = []
        self._next = self._num_bytes = 0

    def called(self, output: object, *, is_part: bool = False) -> None:
        """A model has returned ``output``, or a part of it that was called directly."""
        tensors = tensors_of(output)
        if is_part:
            self.parts.add(len(self.outputs))
        self.outputs.append([each.detach() for each in tensors])
        self._steps.append(_Output(len(self.outputs) - 1, self._made(tensors)))
        self._hold(tensors)

    def before(self, function: TorchFunction, args: Args) -> Tensor | None:
        """What a tensor of the loop's own holds that the function is about to write into."""
        name = getattr(function, "__name__", "")
        if not self.outputs or not args or not isinstance(args[0], Tensor) or not _writes(name):
            return None
        is_kept = args[0].nbytes <= MOST_WRITTEN if args[0].layout == torch.strided else False
        return args[0].detach().clone() if is_kept and self._slot_of(args[0]) is None else None

    def add(
        self, function: TorchFunction, args: Args, kwargs: Kwargs, result: object, before: Tensor | None = None
    ) -> None:
        """A torch function was called; it is a part of the program where outputs have come to it."""
        if not self.is_whole:
            return
        reads: list[int] = []
        outside: list[Tensor] = []

        def written(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            if (slot := self._slot_of(leaf)) is not None:
                reads.append(slot)
                return Slot(slot)
            kept = before if before is not None and leaf is args[0] else leaf
            outside.append(kept)
            return kept

        known: Any = mapped((args, kwargs), written)
        if not reads:
            return
        is_item = getattr(function, "__name__", "") == "__setitem__"
        made = [args[0]] if is_item else tensors_of(result, 2)
        if not made:
            return
        writes = bool(args) and any(each is args[0] for each in made)
        self._steps.append(FigureCall(function, known[0], known[1], self._made(made), writes))
        self._hold(outside)

    def left(self, tensor: object, escape: int) -> None:
        """The value of a tensor has left torch."""
        slot = self._slot_of(tensor) if isinstance(tensor, Tensor) else None
        if slot is not None:
            self._steps.append(_Number(slot, escape))

    @property
    def calls(self) -> list[FigureCall]:
        """The functions in their order."""
        return [each for each in self._steps if isinstance(each, FigureCall)]

    @property
    def others(self) -> list[tuple[str, object]]:
        """The arguments of the functions that are neither tensors nor plain values, such as generators."""
        return [other for call in self.calls for other in others_in((call.args, call.kwargs))]

    @property
    def output_slots(self) -> list[list[int]]:
        """Of each call, in the order of ``outputs``."""
        return [each.slots for each in self._steps if isinstance(each, _Output)]

    @property
    def numbers(self) -> dict[int, int]:
        """The slot of each number that left torch, by the number of the escape."""
        return {each.escape: each.slot for each in self._steps if isinstance(each, _Number)}

    def calls_behind(self, slot: int, stop: Container[int]) -> list[FigureCall] | None:
        """The functions that made a slot of those in ``stop``; None where it is made of other outputs too."""
        made_by = {made: call for call in self.calls for made in call.slots}
        to_see, seen, found = [slot], {slot}, []
        while to_see:
            slot = to_see.pop()
            if slot in stop:
                continue
            if slot not in made_by:
                return None
            found.append(made_by[slot])
            new = {each.number for each in leaves_of(found[-1]) if isinstance(each, Slot)} - seen
            seen |= new
            to_see += new
        return found

    def run(self, change: Change, put: Put = _as_it_is) -> dict[int, Tensor]:
        """What leaves torch, by the number of the escape, with other outputs. Raises what a function raises.

        ``put`` gives the value of each slot in place of the one that was computed.
        """
        values: dict[int, Tensor] = {}
        numbers: dict[int, Tensor] = {}

        def read(leaf: object) -> object:
            if isinstance(leaf, Tensor) and leaf.is_inference():  # autograd would not keep it
                return leaf.clone()
            return values[leaf.number] if isinstance(leaf, Slot) else leaf

        for each in self._steps:
            if isinstance(each, _Output):
                made = change(each.call, self.outputs[each.call])
                values.update((slot, put(slot, value)) for slot, value in zip(each.slots, made))
            elif isinstance(each, _Number):
                numbers[each.escape] = values[each.slot]
            else:
                args, kwargs = mapped(each.args, read), mapped(each.kwargs, read)
                if each.writes and isinstance(each.args[0], Tensor):  # of the loop's own: it keeps its values
                    args = (args[0].clone(), *args[1:])
                result = each.function(*args, **kwargs)
                made = [args[0]] if each.writes else tensors_of(result, 2)
                values.update((slot, put(slot, value)) for slot, value in zip(each.slots, made))
        return numbers

    def _made(self, tensors: Sequence[Tensor]) -> list[int]:
        numbers = []
        for tensor in tensors:
            self._slots[id(tensor)] = (weakref.ref(tensor), self._next)
            numbers.append(self._next)
            self._next += 1
        return numbers

    def _slot_of(self, tensor: Tensor) -> int | None:
        reference, number = self._slots.get(id(tensor), (None, None))
        return number if reference is not None and reference() is tensor else None

    def _hold(self, tensors: Sequence[Tensor]) -> None:
        self._num_bytes += sum(num_bytes(each) if is_dense(each) else BYTES + 1 for each in tensors)
        if self._num_bytes > BYTES:
            self.forget()
            self.is_whole = False
