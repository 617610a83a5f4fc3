"""Predictions that a loss over single elements calls perfect: its targets have two values, as those of BCE or Dice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from trainwright.recorder.escapes import Escape
from trainwright.recorder.figure_program import Change, FigureCall, FigureProgram, leaves_of
from trainwright.recorder.program import Slot

MIDDLE = 0.5
"""Here a logit or a probability knows nothing, and lies between the targets."""
SURE = 6.0
"""A logit whose probability is nearly 1. Of a larger one a loss with smoothed targets would be large."""
NEARLY = 1e-3
"""By which a probability differs from 0 or 1: the logarithm of neither is asked for."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """What an output should be: ``high`` where its target is the larger one; the loss ``counts`` some positions."""

    high: Tensor
    counts: Tensor

    @property
    def has_both(self) -> bool:
        """Whether both values are among those that count."""
        return bool((self.high & self.counts).any()) and bool((~self.high & self.counts).any())

    def is_told_by(self, tensor: Tensor) -> bool:
        """Whether a tensor of two values tells these targets from each other, or the reverse."""
        if tensor.numel() != self.high.numel() or tensor.is_complex() or not self.has_both:
            return False
        values = tensor.detach().flatten().to(self.high.device)[self.counts.flatten()].double()
        high = self.high.flatten()[self.counts.flatten()]
        is_most = values == values.max()
        has_two = bool((is_most | (values == values.min())).all())
        return has_two and (torch.equal(is_most, high) or torch.equal(is_most, ~high))


Place: TypeAlias = tuple[int, int]
"""The number of a call and of its output."""
Places: TypeAlias = dict[Place, Wanted]


@dataclass(frozen=True)
class Perfect:
    """What the outputs should be, and the values of perfect predictions."""

    wanted: Places
    low: float
    high: float

    def changes(self, program: FigureProgram) -> tuple[Change, Change]:
        """To perfect and to wrong predictions. Where the loss does not count an output, it stays as it is."""
        right, wrong = (
            {
                (call, number): torch.where(
                    each.counts,
                    torch.where(each.high, high, low).to(program.outputs[call][number]),
                    program.outputs[call][number],
                )
                for (call, number), each in self.wanted.items()
            }
            for low, high in ((self.low, self.high), (self.high, self.low))
        )
        return _put(right), _put(wrong)


def perfect_by_elements(program: FigureProgram, escapes: Sequence[Escape], same: set[int]) -> Perfect | None:
    """None where no number is the loss of outputs against a tensor of two values that the program was given."""
    given = _given(program)
    if not given:
        return None
    losses = [n for n in same if (origin := escapes[n].origin) is not None and not origin.decided]
    for line in dict.fromkeys(escapes[n].line for n in losses):
        of_line = [n for n in losses if escapes[n].line == line]
        wanted, values = _wanted(program, given, of_line)
        if wanted and len(values) == 2 and (found := _sure(program, wanted, values, of_line)) is not None:
            return found
    return None


def owned(program: FigureProgram) -> Iterator[tuple[Place, FigureCall]]:
    """The functions that each output is given to, itself or what is made of it and of no other."""
    owners: dict[int, Place] = {}
    for call, slots in enumerate(program.output_slots):
        owners.update({slot: (call, number) for number, slot in enumerate(slots)})
    for each in program.calls:
        of = {owners.get(leaf.number) for leaf in leaves_of(each) if isinstance(leaf, Slot)}
        place = of.pop() if len(of) == 1 else None
        if place is not None:
            owners.update(dict.fromkeys(each.slots, place))
            yield place, each


def _given(program: FigureProgram) -> dict[Place, list[Tensor]]:
    """The tensors of as many elements as an output that functions of it are given, and that came of no output."""
    found: dict[Place, list[Tensor]] = {}
    for place, call in owned(program):
        output = program.outputs[place[0]][place[1]]
        for leaf in leaves_of(call) if output.is_floating_point() else ():
            if not isinstance(leaf, Tensor) or leaf.is_complex() or not leaf.numel() == output.numel() > 1:
                continue
            if all(leaf is not each for each in found.get(place, ())):
                found.setdefault(place, []).append(leaf)
    return found


def _wanted(
    program: FigureProgram, given: Mapping[Place, Sequence[Tensor]], losses: Sequence[int]
) -> tuple[Places, list[float]]:
    """Targets by the sign of the derivative of a loss at outputs that know nothing, and the two values that they have
    where the loss is given them; other than two where it is not.
    """
    with torch.enable_grad():
        leaves = {
            (call, number): torch.full_like(program.outputs[call][number], MIDDLE).requires_grad_()
            for call, number in given
        }
        numbers = program.run(_put({place: each * 1 for place, each in leaves.items()}))
        known = [numbers[n] for n in losses if numbers[n].requires_grad]
        if not known:
            return {}, []
        total = torch.stack([each.double().sum() for each in known]).sum()
        slopes = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    wanted: Places = {}
    lows, highs = set[float](), set[float]()
    for place, slope in zip(leaves, slopes):
        if slope is None or not bool(slope.isfinite().all()):
            continue
        values = next((v for each in given[place] if (v := _two_values(slope, each)) is not None), None)
        if values is not None:
            wanted[place] = Wanted(slope < 0, slope != 0)
            lows.update(values[0])
            highs.update(values[1])
    is_of_two = len(lows) == len(highs) == 1
    return wanted, sorted(lows | highs) if is_of_two else []


def _two_values(slope: Tensor, given: Tensor) -> tuple[set[float], set[float]] | None:
    """The value of a tensor where the slope is positive, and the larger one where it is negative."""
    given, slope = given.detach().flatten().to(slope.device), slope.flatten()
    low, high = (_ends(given[where]) for where in (slope > 0, slope < 0))
    if len(low) > 1 or len(high) > 1 or not low | high or (low and high and min(low) >= max(high)):
        return None
    return low, high


def _ends(values: Tensor) -> set[float]:
    return {float(values.min()), float(values.max())} if values.numel() else set()


def _sure(program: FigureProgram, wanted: Places, values: Sequence[float], losses: Sequence[int]) -> Perfect | None:
    """With the values at which the loss is least. None where it is not far less than for wrong predictions."""
    are_shares = all(_is_share(program.outputs[call][number]) for call, number in wanted)
    pairs = [(NEARLY, 1.0 - NEARLY)] if are_shares else [(values[0], values[1]), (-SURE, SURE)]
    tried: list[tuple[float, float, Perfect]] = []
    for low, high in pairs:
        found = Perfect(wanted, low, high)
        runs = [program.run(change) for change in found.changes(program)]
        right, wrong = (sum(float(numbers[n]) for n in losses) for numbers in runs)
        tried.append((right, wrong, found))
    right, wrong, found = min(tried, key=lambda each: each[0])
    return found if right < wrong and right <= wrong / 2 else None


def _is_share(output: Tensor) -> bool:
    return bool((output >= 0).all()) and bool((output <= 1).all())


def _put(instead: dict[tuple[int, int], Tensor]) -> Change:
    def change(call: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [instead.get((call, number), each) for number, each in enumerate(outputs)]

    return change
