"""What an evaluation computes of outputs that equal what they are compared with: of a distance that is 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trainwright.doctor.data.facts import BEST_SHARES, DistanceFigure
from trainwright.recorder.escapes import Escape
from trainwright.recorder.figure_program import FigureCall, FigureProgram, Put, compared_by, leaves_of, name_of

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
