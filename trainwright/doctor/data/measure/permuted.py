"""What an evaluation computes of outputs that are given to other rows than their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor

from trainwright.doctor.data.facts import PermutedFigure
from trainwright.doctor.data.measure.distances import as_they_are
from trainwright.doctor.data.measure.figure_parts import EscapeLine, place_of
from trainwright.recorder.escapes import Escape
from trainwright.recorder.figure_program import Change, FigureProgram

ORDERS = 6
"""Random orders of the rows: enough for a mean and a deviation."""
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
        nearby = [program.run(_moved(by)) for by in NEARBY]
    same = {n for n, value in told.items() if float(value) == escapes[n].value}
    places: dict[EscapeLine, list[int]] = {}
    for n, each in enumerate(escapes):
        places.setdefault(place_of(each), []).append(n)
    for place, at in places.items():
        if same.issuperset(at):
            mean, *others = (math.fsum(float(of[n]) for n in at) / len(at) for of in (told, *in_orders, *nearby))
            if math.isfinite(mean) and all(map(math.isfinite, others)):
                yield _figure(place, mean, others[:ORDERS], others[ORDERS:])


def _figure(place: EscapeLine, told: float, others: Sequence[float], nearby: Sequence[float]) -> PermutedFigure:
    return PermutedFigure(
        line=place.line, told=told, others=fmean(others), deviation=stdev(others), nearby=tuple(nearby)
    )


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
