"""What a number asks of decisions about single elements: whether they equal their targets, or how they overlap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from trainwright.doctor.data.measure.two_values import Place, Places, Wanted, owned
from trainwright.recorder.figure_program import FigureCall, FigureProgram, leaves_of, name_of
from trainwright.recorder.program import Slot

THRESHOLDS = frozenset({"gt", "ge", "lt", "le", "round", "greater", "greater_equal", "less", "less_equal", "sign"})
EQUALITY = frozenset({"eq", "ne", "xor", "logical_xor", "bitwise_xor", "not_equal"})
OVERLAP = frozenset({"and", "rand", "or", "ror", "iand", "ior", "logical_and", "logical_or", "bitwise_and"})
OVERLAP |= {"bitwise_or", "mul", "rmul", "getitem", "masked_select", "where", "masked_fill"}
ADDING, DIVIDING = frozenset({"add", "radd", "iadd"}), frozenset({"div", "truediv", "rtruediv", "rdiv", "true_divide"})
PLAIN = THRESHOLDS | EQUALITY | OVERLAP | ADDING | DIVIDING
PLAIN |= {"sigmoid", "float", "double", "half", "int", "long", "bool", "to", "type", "cpu", "cuda", "detach", "clone"}
PLAIN |= {"invert", "logical_not", "bitwise_not", "rsub", "clamp", "clamp_min", "view", "reshape", "flatten", "squeeze"}
PLAIN |= {"unsqueeze", "permute", "transpose", "contiguous", "cat", "stack", "type_as"}
PLAIN |= {"sum", "mean", "all", "any", "count_nonzero", "nanmean"}
"""Functions that a share of decisions is made of: none of them chooses among elements, or compares these."""
Asks: TypeAlias = Literal["", "equality", "overlap"]


@dataclass(frozen=True)
class Question:
    """``is_exact``: nothing else has a part in it, such as another mask or a constant that makes it smooth. Where it is
    asked what is right of one class, it asks for the overlap with it.
    """

    asks: Asks
    is_exact: bool


def question(calls: Sequence[FigureCall], wanted: Mapping[int, Wanted]) -> Question | None:
    """What a number asks that these functions make of outputs, the slots of ``wanted``. None where it is not known."""
    names = {name_of(each) for each in calls}
    decisions = [each for each in calls if name_of(each) in THRESHOLDS]
    if not decisions or not names <= PLAIN or any(_num_slots(each) != 1 for each in decisions):
        return None
    read = {leaf.number for call in calls for leaf in leaves_of(call) if isinstance(leaf, Slot)}
    of = [each for slot, each in wanted.items() if slot in read]
    asked = set[Asks]()
    others = False
    for name, given in _given(calls, EQUALITY | OVERLAP):
        same = [each for each in of if each.high.numel() == given.numel()]
        if any(each.is_told_by(given) for each in same):
            asked.add("equality" if name in EQUALITY else "overlap")
        elif not same or all(each.has_both for each in same):
            others = True
    counts_all = all(bool(each.counts.all()) for each in of)
    is_exact = counts_all and not others and len(asked) < 2 and not any(map(_is_smooth, calls))
    return Question("overlap" if "overlap" in asked else "equality" if asked else "", is_exact)


def linked(program: FigureProgram, wanted: Places) -> Places:
    """Outputs of calls without a loss of their own that are compared with the targets of a call with one: of the model
    once more, or of its last part.
    """
    shapes = {each.high.shape for each in wanted.values()}
    every = ((call, n) for call, of in enumerate(program.outputs) for n, each in enumerate(of) if each.shape in shapes)
    alone = sorted(set(every) - wanted.keys())
    found: Places = {}
    for place, call in owned(program) if alone else ():
        if place in alone and place not in found:
            given = [tensor for _, tensor in _given([call], EQUALITY | OVERLAP)]
            alike = [one for one in _beside(place, alone, wanted) if any(map(one.is_told_by, given))]
            if alike:
                found[place] = alike[0]
    return found


def _beside(place: Place, alone: Sequence[Place], wanted: Places) -> list[Wanted]:
    """What it may be meant for: the targets of the call before it, or of that with its number in another pass."""
    places = sorted(wanted)
    before = [each for each in places if each < place][-1:]
    same = places[alone.index(place) :][:1]
    return [wanted[each] for each in (*before, *same)]


def _num_slots(call: FigureCall) -> int:
    return sum(isinstance(each, Slot) for each in leaves_of(call))


def _given(calls: Sequence[FigureCall], names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of several elements that came of no output, with the name of the function that is given them."""
    for call in calls:
        if (name := name_of(call)) in names:
            yield from ((name, leaf) for leaf in leaves_of(call) if isinstance(leaf, Tensor) and leaf.numel() > 1)


def _is_smooth(call: FigureCall) -> bool:
    """Whether it divides by what is computed, or adds a number."""
    name, leaves = name_of(call), leaves_of(call)
    if name in DIVIDING:
        is_by_a_number = isinstance(leaves[0], Slot) and all(isinstance(each, int | float) for each in leaves[1:])
        return name.startswith("r") or not is_by_a_number
    return name in ADDING and any(isinstance(each, int | float) and each for each in leaves)
