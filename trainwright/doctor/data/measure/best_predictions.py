"""What the decisions of an evaluation are worth where predictions are perfect, by the loss that it computes itself."""

from __future__ import annotations

import linecache
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainwright.doctor.data.facts import DecidedFigure
from trainwright.doctor.data.measure.asked import linked, question
from trainwright.doctor.data.measure.distances import as_they_are, in_place
from trainwright.doctor.data.measure.figure_parts import EscapeLine, place_of
from trainwright.doctor.data.measure.ranked import counts_ranks, rank_changes, ranked
from trainwright.doctor.data.measure.two_values import perfect_by_elements
from trainwright.recorder.escapes import Escape
from trainwright.recorder.figure_program import Change, FigureCall, FigureProgram, compared_by, leaves_of

SURE = 30.0
"""By which the logit of a class is larger than any other: its probability is as good as 1."""
EQUALITY = frozenset({"eq", "ne"})
"""Functions that tell right from wrong."""
SUMMED = re.compile(r"\s*(\w+)\s*(?:\+?=[^=]|\.append\()")
ALIKE = 0.5
"""Of the labels are those of the loss: the others may be wrong on purpose."""
LEAST = 8
"""Positions with a target: of fewer one negative derivative each may be chance."""


def decided_figures(program: FigureProgram, escapes: Sequence[Escape]) -> Iterator[DecidedFigure]:
    """What decisions are worth that are right by the loss, or that equal what they are compared with.

    Yields nothing where the program does not give the same numbers again.
    """
    decisions = [n for n, each in enumerate(escapes) if each.origin is not None and each.origin.decided]
    if not program.is_whole or not decisions:
        return
    values: dict[int, Tensor] = {}
    cards = {each.device.index for one in program.outputs for each in one if each.is_cuda}
    with torch.random.fork_rng(devices=list(cards)):
        told = program.run(as_they_are, values.setdefault)
        same = {n for n, value in told.items() if float(value) == escapes[n].value}
        known = [*_of_elements(program, escapes, decisions, same), *_of_ranks(program, escapes, decisions, same)]
        yield from known
        heard = {(each.of, each.over) for each in known}
        decisions = [n for n in decisions if _key(escapes[n]) not in heard]
        if decisions:
            yield from _of_classes(program, escapes, decisions, same, values)


def _key(escape: Escape) -> tuple[str, int]:
    """As a figure is known that is made of it."""
    place = place_of(escape)
    return place.words, place.over


def _of_elements(
    program: FigureProgram, escapes: Sequence[Escape], decisions: Sequence[int], same: set[int]
) -> Iterator[DecidedFigure]:
    """Where the loss has targets of two values."""
    perfect = perfect_by_elements(program, escapes, same)
    if perfect is None:
        return
    perfect = replace(perfect, wanted=perfect.wanted | linked(program, perfect.wanted))
    wanted = {program.output_slots[call][number]: each for (call, number), each in perfect.wanted.items()}
    slots = program.numbers
    behind = {n: program.calls_behind(slots[n], wanted) for n in decisions if n in slots}
    asked = {n: question(calls, wanted) for n, calls in behind.items() if calls is not None}
    known = {n: each for n, each in asked.items() if each is not None}
    best = [program.run(change) for change in perfect.changes(program)]
    for each in _figures(decisions, escapes, same, best):
        numbers = [n for n in decisions if _key(escapes[n]) == (each.of, each.over)]
        if known.keys() >= set(numbers):
            asks = next((known[n].asks for n in numbers if known[n].asks), "none")
            yield replace(each, asks=asks, is_exact=all(known[n].is_exact for n in numbers))


def _of_ranks(
    program: FigureProgram, escapes: Sequence[Escape], decisions: Sequence[int], same: set[int]
) -> Iterator[DecidedFigure]:
    """Where the scores are counted that are larger than that of the target."""
    targets, places = ranked(program)
    if not targets:
        return
    slots = program.numbers
    behind = {n: program.calls_behind(slots[n], targets) for n in decisions if n in slots}
    known = {n for n, calls in behind.items() if calls and counts_ranks(calls)}
    best = [program.run(change) for change in rank_changes(program, targets, places)]
    yield from (
        replace(each, asks="rank") for each in _figures([n for n in decisions if n in known], escapes, same, best)
    )


def _of_classes(
    program: FigureProgram,
    escapes: Sequence[Escape],
    decisions: Sequence[int],
    same: set[int],
    values: Mapping[int, Tensor],
) -> Iterator[DecidedFigure]:
    """Where the loss has one class for each position, or decisions are tested for equality."""
    targets, labels = _targets(program, escapes, same), _labels(program.calls, values)
    others = {slot: ~each if each.dtype == torch.bool else each + 1 for slot, each in labels.items()}
    equal, unequal = (program.run(as_they_are, in_place(of)) if labels else {} for of in (labels, others))
    if targets is not None:
        right, wrong = dict[int, Tensor](), dict[int, Tensor]()
        best = [program.run(_with_class(targets, n), of.setdefault) for n, of in enumerate((right, wrong))]
        pairs = list(compared_by(program.calls, EQUALITY))
        noisy = [label for slot, label in pairs if _is_nearly(right.get(slot), wrong.get(slot), label)]
        decisions = [n for n in decisions if not _is_made_of(program, n, noisy)]
        yield from _figures(decisions, escapes, same, best, (*best, equal))
    elif labels:
        counted = {slot: _counted(program.calls, each) for slot, each in labels.items()}
        tried = [
            program.run(as_they_are, in_place({n: torch.where(counted[n], of[n], values[n]) for n in labels}))
            for of in (labels, others)
        ]
        slots = program.numbers
        alone = [n for n in decisions if n in slots and program.calls_behind(slots[n], labels) is not None]
        yield from _figures(alone, escapes, same, [equal, unequal], (*tried, equal), compared=True)


def _figures(
    decisions: Sequence[int],
    escapes: Sequence[Escape],
    same: set[int],
    best: Sequence[Mapping[int, Tensor]],
    tried: Sequence[Mapping[int, Tensor]] = (),
    *,
    compared: bool = False,
) -> Iterator[DecidedFigure]:
    places: dict[EscapeLine, list[int]] = {}
    for n in decisions:
        places.setdefault(place_of(escapes[n]), []).append(n)
    for place, numbers in places.items():
        if same.issuperset(numbers):
            perfect, wrong = (math.fsum(float(of[n]) for n in numbers) for of in best)
            told = math.fsum(escapes[n].value for n in numbers)
            yield DecidedFigure(
                line=place.line,
                of=place.words,
                over=place.over,
                times=len(numbers),
                is_mean=place.reduction == "mean",
                told=told,
                perfect=perfect,
                wrong=wrong,
                compared=compared,
                sum_name=sum_name(escapes[numbers[0]]),
                is_elsewhere=told == 0 and _is_elsewhere(numbers, tried),
            )


def _is_elsewhere(numbers: Sequence[int], tried: Sequence[Mapping[int, Tensor]]) -> bool:
    """Whether they stay 0 with right and with wrong predictions where the loss counts these, but not where every
    decision is as it is compared.
    """
    sums = [math.fsum(float(of[n]) for n in numbers) if of else 0.0 for of in tried]
    return len(sums) == 3 and sums[0] == sums[1] == 0.0 and sums[2] >= LEAST


def sum_name(escape: Escape) -> str:
    """The variable that its line adds to, or sets: ``right += ...``, ``hits.append(...)``."""
    number = (escape.line or "").rpartition(":")[2]
    if escape.code is None or not number:
        return ""
    found = SUMMED.match(linecache.getline(escape.code.co_filename, int(number)))
    return found[1] if found is not None else ""


def _labels(calls: Sequence[FigureCall], values: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """What is tested for equality with one tensor of its shape that came of no output, and has several values."""
    pairs = list(compared_by(calls, EQUALITY))
    often = Counter(slot for slot, _ in pairs)
    known = [(slot, values[slot], label) for slot, label in pairs if slot in values and often[slot] == 1]
    alike = [each for each in known if each[1].shape == each[2].shape and each[2].numel() >= LEAST]
    return {slot: label.to(value) for slot, value, label in alike if bool((label != label.flatten()[0]).any())}


def _counted(calls: Sequence[FigureCall], label: Tensor) -> Tensor:
    """Where a loss of the same evaluation that is given these labels does not leave them out."""
    for call in calls:
        left_out, given = call.kwargs.get("ignore_index"), [*call.args[1:2], call.kwargs.get("target")]
        targets = [each for each in given if isinstance(each, Tensor) and each.numel() == label.numel()]
        if left_out is not None and any(torch.equal(each.flatten(), label.flatten()) for each in targets):
            return label.ne(torch.as_tensor(left_out))
    return torch.ones_like(label, dtype=torch.bool)


Targets = Mapping[int, tuple[int, Tensor, int, Tensor]]
"""By call: which output, the target of each position, the axis of the classes, and which positions have one."""


def _targets(program: FigureProgram, escapes: Sequence[Escape], same: set[int]) -> Targets | None:
    """Of each call of the model as a whole; None where one has none."""
    outputs = {call: each for call, each in enumerate(program.outputs) if call not in program.parts}
    chosen = {call: next((n for n, each in enumerate(of) if _is_of_classes(each)), -1) for call, of in outputs.items()}
    if not chosen or min(chosen.values()) < 0:
        return None
    with torch.enable_grad():
        leaves = {call: outputs[call][n].detach().clone().requires_grad_() for call, n in chosen.items()}
        numbers = program.run(
            lambda call, of: _replaced(of, chosen[call], leaves[call] * 1) if call in chosen else list(of)
        )
        losses = [v for n, v in numbers.items() if n in same and v.requires_grad and not _is_decided(escapes[n])]
        if not losses:
            return None
        slopes = torch.autograd.grad(
            sum(losses, start=torch.zeros((), device="cpu")), list(leaves.values()), allow_unused=True
        )
    found = {call: None if each is None else _target(each) for call, each in zip(chosen, slopes)}
    known = {call: (chosen[call], *each) for call, each in found.items() if each is not None}
    return known if len(known) == len(chosen) else None


def _is_nearly(right: Tensor | None, wrong: Tensor | None, label: Tensor) -> bool:
    """Whether labels are those of the loss at most positions, and not at all: it, or they, may be noisy."""
    if right is None or wrong is None or not right.shape == wrong.shape == label.shape:
        return False
    counts = right != wrong
    share = float((right == label)[counts].double().mean()) if bool(counts.any()) else 1.0
    return ALIKE <= share < 1.0


def _is_made_of(program: FigureProgram, number: int, tensors: Sequence[Tensor]) -> bool:
    if not tensors or number not in program.numbers:
        return False
    outputs = {slot for slots in program.output_slots for slot in slots}
    behind = program.calls_behind(program.numbers[number], outputs) or []
    return any(leaf is each for call in behind for leaf in leaves_of(call) for each in tensors)


def _is_of_classes(output: Tensor) -> bool:
    return output.is_floating_point() and output.dim() >= 2


def _is_decided(escape: Escape) -> bool:
    return escape.origin is None or escape.origin.decided


def _target(slope: Tensor) -> tuple[Tensor, int, Tensor] | None:
    """Targets, axis and positions, where each position that counts has one negative derivative."""
    for axis in dict.fromkeys((slope.dim() - 1, 1)):
        counts = (slope != 0).any(axis)
        has_one = (slope < 0).sum(axis) == 1
        if slope.shape[axis] > 1 and int(counts.sum()) >= LEAST and bool((has_one | ~counts).all()):
            return slope.argmin(axis), axis, counts
    return None


def _replaced(outputs: Sequence[Tensor], number: int, by: Tensor) -> list[Tensor]:
    return [by if n == number else each for n, each in enumerate(outputs)]


def _with_class(targets: Targets, shift: int) -> Change:
    """Outputs in which the class of the target, or the one ``shift`` after it, is far the largest."""

    def change(call: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        if call not in targets:
            return list(outputs)
        number, target, axis, counts = targets[call]
        output = outputs[number]
        classes = (target + shift) % output.shape[axis]
        more = (output.amax() - output.amin() + SURE) * counts.unsqueeze(axis).to(output)
        return _replaced(outputs, number, output.scatter_add(axis, classes.unsqueeze(axis), more))

    return change
