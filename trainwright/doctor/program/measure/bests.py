"""Follows the best values of a loop, and what it compares with them, from evaluation to evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from trainwright.doctor.program.compared_bests import ComparedBest, compared_bests
from trainwright.doctor.program.facts import BestsFacts, FollowedBest
from trainwright.doctor.program.measure.written import program_of
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.runlog.json_values import Facts, strict


@dataclass
class _Following:
    """One comparison: the last value that was read, and what came of it so far."""

    of: ComparedBest
    begin: float = math.nan
    best: float = math.nan
    last: float = math.nan
    values: int = 0
    beaten: int = 0
    moved: int = 0
    low: float = math.inf
    high: float = -math.inf

    def read(self, best: float, value: float) -> None:
        self.moved += bool(self.values) and best != self.best
        self.begin = self.begin if self.values else best
        self.best = best
        if value != self.last:
            self.values, self.last = self.values + 1, value
            self.beaten += value < best if self.of.sign == "<" else value > best
            self.low, self.high = min(self.low, value), max(self.high, value)


class BestsProbe(Probe):
    """Nothing is read but in the steps after an evaluation. The source is read after the first of them."""

    name = BestsFacts.experiment
    closes_late = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._watched = watched
        self._evaluated = False
        self._following: list[_Following] | None = None

    def on_forward_without_grad(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self._evaluated = True

    def on_closed(self, step: RecordedStep) -> None:
        if self._evaluated:
            self._read()
        self._evaluated = False

    def _read(self) -> None:
        if self._following is None:
            program = program_of(self._watched.code())
            self._following = [] if program is None else [_Following(each) for each in compared_bests(program)]
        if self._following:
            numbers = self._watched.numbers()
            for each in self._following:
                if each.of.name in numbers and each.of.value in numbers:
                    each.read(numbers[each.of.name], numbers[each.of.value])

    def values(self) -> Facts | None:
        if self._evaluated:
            self._read()  # of an evaluation that no step has followed
        code, known = self._watched.code(), [each for each in self._following or () if each.values]
        if code is None or not known:
            return None
        file = Path(code.co_filename).name
        return dict(strict(vars(BestsFacts(bests=tuple(_followed(each, file) for each in known)))))


def _followed(each: _Following, file: str) -> FollowedBest:
    return FollowedBest(
        name=each.of.name,
        value=each.of.value,
        sign=each.of.sign,
        line=f"{file}:{each.of.line}",
        begin=each.begin,
        now=each.best,
        values=each.values,
        beaten=each.beaten,
        moved=each.moved,
        low=each.low,
        high=each.high,
    )
