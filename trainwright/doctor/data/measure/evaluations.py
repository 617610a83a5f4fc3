"""What an evaluation computes, and what the loop has of it afterwards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from trainwright.doctor.data.facts import Computed, EvaluationFacts
from trainwright.doctor.data.measure.alike import Likenesses
from trainwright.doctor.data.measure.best_predictions import decided_figures
from trainwright.doctor.data.measure.call_places import CallPlaces
from trainwright.doctor.data.measure.chosen_rows import RowsChosen
from trainwright.doctor.data.measure.distances import distance_figures, turned_figures
from trainwright.doctor.data.measure.figure_parts import (
    EscapeLine,
    EscapeLines,
    all_readings,
    away_from,
    by_place,
    rows_of,
)
from trainwright.doctor.data.measure.kept_numbers import KeptNumbers
from trainwright.doctor.data.measure.loop_figures import figures_among
from trainwright.doctor.data.measure.permuted import permuted_figures
from trainwright.doctor.data.measure.tuple_names import NumbersByName
from trainwright.doctor.data.share_names import is_named_share
from trainwright.recorder.callers import Line, line_within
from trainwright.recorder.copies import is_a_copy
from trainwright.recorder.escapes import Escape, EscapeTape
from trainwright.recorder.figure_program import FigureProgram
from trainwright.recorder.hooks import listening_to_calls, muted
from trainwright.recorder.part_calls import PartCalls
from trainwright.recorder.plain_tensors import rows_of as rows_in
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import RecordedStep, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, Loader
from trainwright.runlog.json_values import Event, Facts, strict
from trainwright.state.isolation import NotIsolated, isolated
from trainwright.state.reach import ReachableState
from trainwright.state.rng import preserved_rng

EACH = 4
"""Evaluations that are recorded, each; then every one whose number is a power of two."""
PLACES = 12
"""Lines with numbers that are looked at."""
COPIES = 4
"""Copies of a model that are heard: a loop may make one for each evaluation."""
Again = TypeVar("Again")


class EvaluationsProbe(Probe):
    """Between the steps of training: nothing is recorded, and nothing costs, while a step runs."""

    name = EvaluationFacts.experiment
    closes_late = hears_last = True
    rests = frozenset({"on_forward", "on_output"})

    def __init__(self, watched: WatchedObjects) -> None:
        self._numbers, self._modules, self._code = NumbersByName(watched), watched.modules, watched.code
        self._kept, self._likenesses, self._chosen = KeptNumbers(), Likenesses(), RowsChosen()
        self._given: list[Tensor] = []
        self._roots = watched.subject.roots
        self._copies: list[nn.Module] = []
        self._open = ExitStack()
        self._tape = EscapeTape()
        self._steps = self._rows = 0
        self._passes: Counter[Line] = Counter()
        self._in_step = self._is_open = self._is_begun = self._is_heard = False
        self._parts = PartCalls(self._on_part, self._on_part_output)
        self._places = CallPlaces()
        self._line: Line = None
        self._before: Mapping[str, float] = {}
        self._shares: set[str] = set()
        self._facts: EvaluationFacts | None = None

    def begin(self, site: WatchSite) -> None:
        self._hear(self._modules())

    def on_woken(self, events: Sequence[Event]) -> None:
        self._in_step = any(kind == "forward" and how[2] for kind, how in events)

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._parts.is_inside = True
        if self._tape.pushed:  # what the model does is none of the evaluation's doing
            self._tape.stop()
        if torch.is_grad_enabled():
            self._in_step = True
            if self._likenesses.wants_training:
                self._likenesses.train(root, tensors_of((args, kwargs), 3))
        elif not self._in_step and self._is_of_an_evaluation() and self._is_wanted():
            self._given = given = tensors_of((args, kwargs), 3)
            self._rows = rows_in(given[0]) if given else 1
            self._is_open = True
            self._likenesses.evaluate(root, given)

    def _is_of_an_evaluation(self) -> bool:
        """Where some lines of the loop call the model before each step, and others do not, the evaluations are theirs;
        they are counted from the first of them.
        """
        had, self._line = self._places.has_evaluations, line_within(self._code())
        self._is_heard = not self._places.is_of_the_step(self._line)
        if self._places.has_evaluations and not had:
            self._passes.clear()
            self._begin_anew()
            self._is_begun = self._is_open = False
        return self._is_heard

    def _begin_anew(self) -> None:
        self._tape.forget()
        self._likenesses.forget()

    def _is_wanted(self) -> bool:
        """Those of each line of the loop are counted apart: the test at the end is the first of its own."""
        if self._is_begun:
            return self._is_open
        self._is_begun = True
        self._passes[self._line] += 1
        number = self._passes[self._line]
        return (number <= EACH or number.bit_count() == 1) and 2 * number <= max(2 * EACH, self._steps)

    def on_output(self, root: nn.Module, output: object) -> None:
        self._parts.is_inside = False
        if self._is_open and self._is_heard and not self._in_step:
            self._tape.called(output, self._rows)
            self._tape.start()
            self._parts.open(root)

    def _on_part(self, part: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if self._tape.pushed:
            self._tape.stop()

    def _on_part_output(self, part: nn.Module, output: object) -> None:
        if self._is_open and self._is_heard and not self._in_step and not torch.is_grad_enabled():
            self._tape.called_part(output)
            self._tape.start()

    def on_epoch(self, loader: Loader, iterator: object) -> None:
        self._tape.passes += 1
        if not self._in_step:
            self._hear(self._modules())

    def on_mode(self, module: nn.Module, training: bool) -> None:
        if not training and self._is_begun:  # of two evaluations in a row the last counts
            self._begin_anew()
            self._is_begun, self._before = self._is_open, self._numbers()
        if not training:
            self._hear([module])

    def _hear(self, modules: Sequence[nn.Module]) -> None:
        """Listens to the calls of those that are copies of what is trained: a loop may evaluate these."""
        known = {id(each) for each in (*self._roots, *self._copies)}
        for module in modules:
            if len(self._copies) < COPIES and id(module) not in known and is_a_copy(module, self._roots):
                known.add(id(module))
                self._copies.append(module)
                self._open.enter_context(listening_to_calls([self], [module]))

    def on_closed(self, step: RecordedStep) -> None:
        self._parts.close()
        if self._tape.pushed:
            self._tape.stop()
        if self._is_begun:
            self._close()
        self._places.close()
        self._chosen.train(step)
        self._in_step, self._steps = False, step.step

    def on_forked(self) -> None:
        self._tape.stop()

    def end(self, error: BaseException | None) -> None:
        self._tape.stop()
        self._parts.close()
        self._open.close()

    def _close(self) -> None:
        if not self._is_begun:
            return
        tape, numbers = self._tape, self._numbers()
        figures = figures_among(numbers)
        if self._is_open and tape.rows:
            places = dict(list(by_place(tape.escapes).items())[:PLACES])
            away = away_from(self._code(), places)
            single = _single(places, tape.rows)
            likenesses = self._likenesses.close()
            worst = max(tape.mass, key=lambda each: each[0], default=(-1.0, None))
            facts = EvaluationFacts(
                after=self._steps,
                calls=len(tape.rows),
                rows=sum(tape.rows),
                most_rows=max(tape.rows),
                arrays=tape.arrays,
                computed=tuple(_computed(places, tape.rows)),
                numbers=tuple(self._kept.read(numbers, self._before, all_readings(places, tape.rows), away)),
                figures={name: value for name, value in figures.items() if self._before.get(name) != value},
                shares=self._shares_among(numbers) if any(place.decided for place in places) else {},
                mass=worst[0],
                mass_line=worst[1],
                likeness=next(iter(likenesses), None),
                further=tuple(likenesses[1:]),
                decided=self._run_again(decided_figures),
                distances=self._run_again(distance_figures),
                turned=self._run_again(turned_figures),
                permuted=self._run_again(permuted_figures),
                counted=tuple(_counted(places)),
                chosen=self._chosen.evaluate(tape.program, self._given),
                at_once=tuple({each.line or "": None for each in tape.escapes if each.origin and each.origin.at_once}),
                single=None if single is None else single.value,
                single_line=None if single is None else single.line,
                undefined=_undefined(places, numbers, tape.program),
            )
            is_repeated = self._before.items() >= numbers.items()
            self._facts = facts if self._facts is None or not is_repeated else _with_numbers_of(self._facts, facts)
        tape.forget()
        self._given = []
        self._is_open = self._is_begun = False
        self._before = numbers

    def _shares_among(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Those that have the name of a share, and that this evaluation or one before has changed.

        A number of decisions may be what it was before by chance.
        """
        shares = {name: value for name, value in numbers.items() if type(value) is float and is_named_share(name)}
        self._shares |= {name for name, value in shares.items() if self._before.get(name) != value}
        return {name: value for name, value in shares.items() if name in self._shares and math.isfinite(value)}

    def _run_again(self, figures: Callable[[FigureProgram, Sequence[Escape]], Iterator[Again]]) -> tuple[Again, ...]:
        try:
            with muted(), preserved_rng(), isolated(ReachableState(self._tape.program.others)):
                return tuple(figures(self._tape.program, self._tape.escapes))
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError, NotIsolated):
            return ()  # functions that cannot be run again so: they write, or insist on something

    def values(self) -> Facts | None:
        self._close()
        return None if self._facts is None else dict(strict(vars(self._facts)))


def _with_numbers_of(before: EvaluationFacts, facts: EvaluationFacts) -> EvaluationFacts:
    """An evaluation after which all numbers of the loop are as they were: what is known of them stays known.

    Such is a last one, of the best weights, where these are those of the evaluation before.
    """
    return replace(
        facts,
        computed=before.computed,
        numbers=before.numbers,
        figures=before.figures,
        shares=before.shares,
        counted=before.counted,
    )


def _counted(places: EscapeLines) -> Iterator[float]:
    """Sums of whole numbers that were made of no output, where decisions are counted."""
    counting = {each.code for place, of in places.items() if place.decided for each in of}
    for place, of in places.items():
        if place.is_count and all(each.code in counting and each.value == int(each.value) >= 0 for each in of):
            yield math.fsum(each.value for each in of)


def _undefined(places: EscapeLines, numbers: Mapping[str, float], program: FigureProgram) -> str | None:
    """The line where all numbers are nan, if the loop has kept one and the outputs have none."""
    lines = [of[0].line for place, of in places.items() if all(math.isnan(each.value) for each in of)]
    outputs = [each for of in program.outputs for each in of]
    is_kept = any(map(math.isnan, numbers.values())) and bool(outputs)
    return lines[0] if lines and is_kept and not any(bool(each.isnan().any()) for each in outputs) else None


def _single(places: EscapeLines, rows: Sequence[int]) -> Escape | None:
    """The mean that left torch, where there is one, of one element of one row."""
    means = [each for place, several in places.items() if place.reduction == "mean" for each in several]
    is_single = max(rows) == len(means) == 1 and means[0].origin is not None and means[0].origin.count == 1
    return means[0] if is_single else None


def _computed(places: EscapeLines, rows: Sequence[int]) -> Iterator[Computed]:
    for place in places:
        if place.is_count:
            continue
        for of, values in _averages(places, place, rows):
            if all(map(math.isfinite, values)):
                yield Computed(
                    of=f"{place.function}{of}",
                    line=place.line,
                    times=len(values),
                    low=min(values),
                    high=max(values),
                    decided=place.decided,
                )


def _averages(places: EscapeLines, place: EscapeLine, rows: Sequence[int]) -> Iterator[tuple[str, list[float]]]:
    """What the numbers of a place are averages of, over a batch each: of sums, all that is divided by a number."""
    escapes = places[place]
    values = [each.value for each in escapes]
    if place.reduction != "sum":
        yield "", values
    if place.reduction == "mean":
        return
    if place.reduction == "sum":
        yield " over its elements", [e.value / e.origin.count for e in escapes if e.origin is not None]
    yield " over the rows", [v / max(1, n) for v, n in zip(values, rows_of(escapes, rows))]
    for other, divisors in places.items():
        is_count = other != place and (other.is_count or (place.decided and other.decided))
        if is_count and len(divisors) == len(escapes) and all(each.value > 0 for each in divisors):
            yield f" over what leaves at {other.line}", [v / d.value for v, d in zip(values, divisors)]
