"""What an evaluation computes of outputs that are given to other rows than their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor

from trainwright.doctor.data.facts import PermutedFigure
from trainwright.doctor.data.measure.best_predictions import EQUALITY, sum_name
from trainwright.doctor.data.measure.distances import as_they_are
from trainwright.doctor.data.measure.figure_parts import EscapeLine, place_of
from trainwright.recorder.escapes import Escape
from trainwright.recorder.figure_program import Change, FigureProgram, compared_by

ORDERS = 6
"""Random orders of the rows: enough for a mean and a deviation."""
SURELY = 5.0
"""Deviations over these orders."""
NEARBY = (1, -1, 2, -2)
"""Rows by which targets may lie beside their own."""


def permuted_figures(program: FigureProgram, escapes: Sequence[Escape]) -> Iterator[PermutedFigure]:
    """Yields nothing where the program does not give the same numbers again.

    The outputs of all calls with as many rows are put in the same order: what compares them with each other stays.
    """
    if not program.is_whole or not program.numbers:
        return
    cards = {each.device.index for one in program.outputs for each in one if each.is_cuda}
    with torch.random.fork_rng(devices=list(cards)):
        told = program.run(as_they_are)
        in_orders = [program.run(_in_order(seed)) for seed in range(ORDERS)]
        is_known = any(_is_apart(float(told[n]), [float(of[n]) for of in in_orders]) for n in told)
        nearby = [] if is_known else [program.run(_moved(by)) for by in NEARBY]
    same = {n for n, value in told.items() if float(value) == escapes[n].value}
    places: dict[EscapeLine, list[int]] = {}
    for n, each in enumerate(escapes):
        places.setdefault(place_of(each), []).append(n)
    for place, at in places.items():
        if same.issuperset(at):
            sums = [math.fsum(float(of[n]) for n in at) / len(at) for of in (told, *in_orders, *nearby)]
            if all(map(math.isfinite, sums)):
                is_blind = place.decided and all(_is_compared_with_one_value(program, n) for n in at)
                yield _figure(place, sum_name(escapes[at[0]]), sums, is_blind=is_blind)


def _is_apart(told: float, others: Sequence[float]) -> bool:
    """Whether a number knows its own rows: then nobody asks for those nearby."""
    are_finite = math.isfinite(told) and all(map(math.isfinite, others))
    return are_finite and abs(told - fmean(others)) > SURELY * stdev(others) > 0.0


def _figure(place: EscapeLine, name: str, sums: Sequence[float], *, is_blind: bool) -> PermutedFigure:
    told, others, nearby = sums[0], sums[1 : 1 + ORDERS], sums[1 + ORDERS :]
    return PermutedFigure(
        line=place.line,
        told=told,
        others=fmean(others),
        deviation=stdev(others),
        nearby=tuple(nearby),
        decided=place.decided,
        of=place.words,
        over=place.over,
        sum_name=name,
        is_blind=is_blind,
    )


def _is_compared_with_one_value(program: FigureProgram, number: int) -> bool:
    """Whether decisions of several rows are tested for equality with a tensor that has one value everywhere."""
    outputs = {slot for slots in program.output_slots for slot in slots}
    behind = program.calls_behind(program.numbers[number], outputs) or []
    labels = [label for _, label in compared_by(behind, EQUALITY)]
    return bool(labels) and all(
        len(each) > 1 and bool((each == each.flatten()[0]).all()) for each in map(_rows, labels)
    )


def _rows(label: Tensor) -> Tensor:
    return label if label.dim() else label[None]


def _in_order(seed: int) -> Change:
    def change(call: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [_reordered(each, torch.Generator().manual_seed(seed)) for each in outputs]

    return change


def _reordered(output: Tensor, draws: torch.Generator) -> Tensor:
    if output.dim() == 0:
        return output
    return output[torch.randperm(len(output), generator=draws, device="cpu").to(output.device)]


def _moved(by: int) -> Change:
    return lambda call, outputs: [each.roll(by, 0) if each.dim() else each for each in outputs]
