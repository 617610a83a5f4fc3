"""What an evaluation computes, and what the loop has of it afterwards."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from trainwright.doctor.data.facts import Computed, EvaluationFacts, KeptNumber
from trainwright.doctor.data.measure.told import figures_among
from trainwright.recorder.escapes import Escape, EscapeTape
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep, tensors_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.runlog.json_values import Facts, strict

EACH = 4
"""Evaluations that are recorded, each; then every one whose number is a power of two."""
EXACT = 1e-9
"""Relative: Python computes with float64, so what was made of some numbers is recognised."""
PLACES = 12
"""Lines with numbers that are looked at."""


class EvaluationsProbe(Probe):
    """Between the steps of training: nothing is recorded, and nothing costs, while a step runs."""

    name = EvaluationFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._numbers = watched.numbers
        self._tape = EscapeTape()
        self._depth = self._steps = self._passes = self._rows = 0
        self._in_step = self._is_open = self._is_begun = False
        self._before: Mapping[str, float] = {}
        self._facts: EvaluationFacts | None = None

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._tape.stop()  # what the model does is none of the evaluation's doing
        if torch.is_grad_enabled():
            self._in_step = True
        elif not self._in_step and self._is_wanted():
            given = tensors_of((args, kwargs), 3)
            self._rows = given[0].shape[0] if given and given[0].dim() else 1
            self._is_open = True

    def _is_wanted(self) -> bool:
        if self._is_begun:
            return self._is_open
        self._is_begun = True
        number = self._passes = self._passes + 1
        return (number <= EACH or number.bit_count() == 1) and 2 * number <= max(2 * EACH, self._steps)

    def on_output(self, root: nn.Module, output: object) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._is_open and not self._in_step:
            self._tape.called(output, self._rows)
            self._tape.start()

    def on_mode(self, module: nn.Module, training: bool) -> None:
        if not training and self._is_open:  # of two evaluations in a row the last counts
            self._tape.forget()

    def on_closed(self, step: RecordedStep) -> None:
        self._tape.stop()
        self._close()
        self._depth, self._in_step, self._steps = 0, False, step.step

    def on_forked(self) -> None:
        self._tape.stop()

    def end(self, error: BaseException | None) -> None:
        self._tape.stop()

    def _close(self) -> None:
        if not self._is_begun:
            return
        tape, numbers = self._tape, figures_among(self._numbers())
        if self._is_open and tape.rows:
            places = dict(list(_by_place(tape.escapes).items())[:PLACES])
            worst = max(tape.mass, key=lambda each: each[0], default=(-1.0, None))
            self._facts = EvaluationFacts(
                after=self._steps,
                calls=len(tape.rows),
                rows=sum(tape.rows),
                arrays=tape.arrays,
                computed=tuple(_computed(places, tape.rows)),
                numbers=tuple(_kept(numbers, self._before, places, tape.rows)),
                mass=worst[0],
                mass_line=worst[1],
            )
        tape.forget()
        self._is_open = self._is_begun = False
        self._before = numbers

    def values(self) -> Facts | None:
        self._close()
        return None if self._facts is None else dict(strict(vars(self._facts)))


Place = tuple[str | None, str, str, bool, bool]
Places = Mapping[Place, Sequence[Escape]]


def _by_place(escapes: Sequence[Escape]) -> Places:
    """By line, and by what they are of."""
    places: dict[Place, list[Escape]] = {}
    for each in escapes:
        origin = each.origin
        made = ("", "", False) if origin is None else (origin.function, origin.reduction, origin.decided)
        places.setdefault((each.line, *made, origin is None), []).append(each)
    return places


def _computed(places: Places, rows: Sequence[int]) -> Iterator[Computed]:
    for place, escapes in places.items():
        origin = escapes[0].origin
        if origin is None:
            continue
        for of, values in _averages(places, place, rows):
            if all(map(math.isfinite, values)):
                yield Computed(
                    of=f"{origin.function}{of}",
                    line=place[0],
                    times=len(values),
                    low=min(values),
                    high=max(values),
                    decided=origin.decided,
                )


def _averages(places: Places, place: Place, rows: Sequence[int]) -> Iterator[tuple[str, list[float]]]:
    """What the numbers of a place are averages of, over a batch each: of sums, all that is divided by a number."""
    escapes = places[place]
    reduction = place[2]
    values = [each.value for each in escapes]
    if reduction != "sum":
        yield "", values
    if reduction == "mean":
        return
    if reduction == "sum":
        yield " over its elements", [e.value / e.origin.count for e in escapes if e.origin is not None]
    yield " over the rows", [v / max(1, n) for v, n in zip(values, _rows_of(escapes, rows))]
    for other, divisors in places.items():
        is_count = other != place and (other[-1] or (place[3] and other[3]))
        if is_count and len(divisors) == len(escapes) and all(each.value > 0 for each in divisors):
            yield f" over what leaves at {other[0]}", [v / d.value for v, d in zip(values, divisors)]


def _rows_of(escapes: Sequence[Escape], rows: Sequence[int]) -> list[int]:
    """The rows of the calls since the number before, or of the last call where there was none between."""
    ends = [0, *(each.call for each in escapes)]
    return [sum(rows[a:b]) if b > a else rows[b - 1] for a, b in pairwise(ends)]


@dataclass(frozen=True)
class _Relation:
    """What a loop may make of the numbers of a place: see KeptNumber."""

    words: str
    value: float
    is_sum: bool = False
    is_partial: bool = False


def _kept(
    numbers: Mapping[str, float], before: Mapping[str, float], places: Places, rows: Sequence[int]
) -> Iterator[KeptNumber]:
    made = [relation for place in places for relation in _relations(places, place, rows)]
    for name, value in numbers.items():
        if not math.isfinite(value):
            continue
        fits = [each for each in made if value and math.isclose(value, each.value, rel_tol=EXACT)]
        best = fits[0] if fits else _Relation("", 0.0)
        yield KeptNumber(
            name=name,
            value=value,
            is_new=before.get(name) != value,
            relation=best.words,
            is_sum=best.is_sum,
            is_partial=best.is_partial,
        )


def _relations(places: Places, place: Place, rows: Sequence[int]) -> Iterator[_Relation]:
    escapes = places[place]
    values = [each.value for each in escapes]
    what, total = f"{place[1] or 'what leaves torch'} at {place[0]}", math.fsum(values)
    is_sum = len(values) > 1
    yield _Relation(f"sum of {what}", total, is_sum)
    yield from (_Relation(what, value, is_sum) for value in values)
    elements = sum(each.origin.count for each in escapes if each.origin is not None)
    for divisor in {len(values), sum(rows), elements} - {0, 1}:
        yield _Relation(f"sum of {what}, over {divisor}", total / divisor)
    of_rows = list(map(float, _rows_of(escapes, rows)))
    for weights in (of_rows, *([each.value for each in others] for others in places.values())):
        whole = math.fsum(weights)
        if len(weights) == len(values) and whole:
            yield _Relation(f"sum of {what}, over that of others", total / whole)
            yield _Relation(f"weighted mean of {what}", math.fsum(map(operator.mul, values, weights)) / whole)
    for batches in {len(rows), *map(len, places.values())} - {1}:
        if place[2] == "mean":
            yield _Relation(f"the last {what}, over {batches}", values[-1] / batches, is_partial=True)
        yield _Relation(f"sum of {what}, over {batches}", total / batches)
