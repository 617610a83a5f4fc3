"""What an evaluation computes of outputs that equal what they are compared with: of a distance that is 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trainwright.doctor.data.facts import BEST_SHARES, DistanceFigure, TurnedFigure
from trainwright.recorder.escapes import Escape
from trainwright.recorder.figure_program import FigureCall, FigureProgram, Put, compared_by, leaves_of, name_of
from trainwright.recorder.program import Slot

COMPARING = frozenset({"sub", "rsub", "cdist", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
"""Functions that are 0 for equal arguments."""
PLAIN = COMPARING | {"norm", "vector_norm", "abs", "absolute", "square", "pow", "sqrt", "mean", "sum", "max", "amax"}
PLAIN |= {"add", "radd", "iadd", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "neg", "float", "double"}
PLAIN |= {
    "to",
    "cpu",
    "detach",
    "clone",
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "unsqueeze",
    "getitem",
    "stack",
    "cat",
}
"""Functions that a distance is made of: none of them gives 0 another value but for what is added."""
ADDING = frozenset({"add", "radd", "iadd", "sub", "rsub", "isub"})
LOSSES = frozenset({"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
EVEN = frozenset({"pow", "square", "abs", "absolute", "norm", "vector_norm"})
"""What makes a distance of a difference."""
SETS = frozenset({"cdist"})
"""Between all pairs: a distance of sets has terms of the reference alone."""


def distance_figures(program: FigureProgram, escapes: Sequence[Escape]) -> Iterator[DistanceFigure]:
    """Yields nothing where the program does not give the same numbers again, or compares nothing."""
    if not program.is_whole or not program.numbers:
        return
    values: dict[int, Tensor] = {}
    cards = {each.device.index for one in program.outputs for each in one if each.is_cuda}
    with torch.random.fork_rng(devices=list(cards)):
        told = program.run(as_they_are, values.setdefault)
        references = _references(program.calls, values)
        if not references:
            return
        constant = {slot: each.mean(0, keepdim=True).expand_as(each) for slot, each in references.items()}
        equal, apart = (program.run(as_they_are, in_place(of)) for of in (references, constant))
    rows = min(len(each) for each in references.values())
    good = [
        number
        for number, slot in program.numbers.items()
        if float(told[number]) == escapes[number].value and _is_of_distances(program.calls_behind(slot, references))
    ]
    shares = {n for n in good if any(math.isclose(float(equal[n]), best, rel_tol=1e-5) for best in BEST_SHARES)}
    for line in dict.fromkeys(escapes[n].line for n in good):
        at = [n for n in good if escapes[n].line == line]
        at = [n for n in at if n not in shares] or at  # R squared beside a distance
        sums = [math.fsum(float(of[n]) for n in at) / len(at) for of in (told, equal, apart)]
        if all(map(math.isfinite, sums)):
            yield DistanceFigure(line=line, rows=rows, told=sums[0], equal=sums[1], apart=sums[2])


def turned_figures(program: FigureProgram, escapes: Sequence[Escape]) -> Iterator[TurnedFigure]:
    """Distances, and what they are with the other sign of the outputs, by the line where they leave torch."""
    if not program.is_whole or not program.numbers:
        return
    values: dict[int, Tensor] = {}
    told = program.run(as_they_are, values.setdefault)
    signed = {slot for slot, reference in _signed(program.calls) if _are_alike(values.get(slot), reference)}
    if not signed:
        return
    turned = program.run(as_they_are, in_place({slot: -values[slot] for slot in signed}))
    places: dict[str | None, list[int]] = {}
    for number, slot in program.numbers.items():
        is_same = float(told[number]) == escapes[number].value
        if is_same and _is_even(program.calls_behind(slot, signed)):
            places.setdefault(escapes[number].line, []).append(number)
    for line, at in places.items():
        sums = [math.fsum(float(of[n]) for n in at) / len(at) for of in (told, turned)]
        if all(map(math.isfinite, sums)):
            yield TurnedFigure(line=line, told=sums[0], turned=sums[1])


def _signed(calls: Sequence[FigureCall]) -> Iterator[tuple[int, Tensor]]:
    """Slots, and what they are compared with, or added to, by what is the same for the other sign of the result."""
    yield from compared_by(calls, LOSSES)
    even = {leaf.number for each in calls if _makes_even(each) for leaf in leaves_of(each) if isinstance(leaf, Slot)}
    yield from compared_by([each for each in calls if even & set(each.slots)], ADDING)


def _makes_even(call: FigureCall) -> bool:
    return name_of(call) in EVEN and (name_of(call) != "pow" or call.args[1:] == (2,))


def _is_even(calls: Sequence[FigureCall] | None) -> bool:
    """Whether plain functions make it of such distances, and no number is added."""
    if calls is None:
        return False
    adding = [leaf for each in calls if name_of(each) in ADDING for leaf in leaves_of(each)]
    has_numbers = any(isinstance(leaf, int | float) or _is_a_term(leaf) for leaf in adding)
    return {name_of(each) for each in calls} <= PLAIN and not has_numbers


def as_they_are(call: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """No output is changed."""
    return outputs


def in_place(of: Mapping[int, Tensor]) -> Put:
    """Puts these tensors in the place of slots."""
    return lambda slot, value: of.get(slot, value)


def _references(calls: Sequence[FigureCall], values: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """What is compared with a tensor of its own shape that came of no output, and with no other."""
    found: dict[int, list[Tensor]] = {}
    for slot, reference in compared_by(calls, COMPARING):
        if _are_alike(values.get(slot), reference):
            found.setdefault(slot, []).append(reference)
    return {slot: each[0] for slot, each in found.items() if all(one is each[0] for one in each)}


def _are_alike(value: Tensor | None, reference: Tensor) -> bool:
    """Several rows, which are not all the same."""
    if value is None or value.shape != reference.shape or not reference.is_floating_point():
        return False
    return reference.dim() > 0 and bool((reference != reference[:1]).any())


def _is_of_distances(calls: Sequence[FigureCall] | None) -> bool:
    """Whether plain functions make it of what is compared, and nothing is added but in distances of sets."""
    if calls is None:
        return False
    names = {name_of(each) for each in calls}
    adds = any(name_of(each) in ADDING and any(map(_is_a_term, leaves_of(each))) for each in calls)
    return names <= PLAIN and bool(names & COMPARING) and (not adds or bool(names & SETS))


def _is_a_term(leaf: object) -> bool:
    """One number that is added, as a penalty is."""
    return isinstance(leaf, Tensor) and leaf.numel() == 1 and bool(leaf.any())
