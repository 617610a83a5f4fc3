"""Readings of the machine over a run, kept in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from trainwright.runs.records import Telemetry

MAX_READINGS = 2000
MAX_READINGS_DRAWN = 300


@dataclass(frozen=True)
class MachineReading:
    """The values read at one time, by name. A name that was not read is absent."""

    time_s: float
    step: int
    values: Mapping[str, float]


class Readings:
    """The readings of a run in order. Beyond MAX_READINGS, the extremes of equal spans of steps are kept."""

    def __init__(self) -> None:
        self.kept: list[MachineReading] = []
        self.count = 0

    def take(self, record: Telemetry) -> None:
        self.add(MachineReading(record.time_s, record.step, record.values))

    def add(self, reading: MachineReading) -> None:
        self.count += 1
        self.kept.append(reading)
        if len(self.kept) > MAX_READINGS:
            self.kept = extremes(self.kept, MAX_READINGS // 4)

    def go_back_to(self, step: int) -> None:
        """Drop readings after ``step``, from which the run continues again."""
        self.kept = [each for each in self.kept if each.step <= step]

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the columns to draw: ``time_s``, ``step``, and one for each name. NaN if it was not read."""
        shown = extremes(self.kept, MAX_READINGS_DRAWN // 2) if len(self.kept) > MAX_READINGS_DRAWN else self.kept
        names = dict.fromkeys(name for each in shown for name in each.values)
        columns = {"time_s": [each.time_s for each in shown], "step": [float(each.step) for each in shown]}
        columns |= {name: [each.values.get(name, np.nan) for each in shown] for name in names}
        return {name: np.array(values, dtype=np.float64) for name, values in columns.items()}


def extremes(readings: Sequence[MachineReading], spans: int) -> list[MachineReading]:
    """Return at most two readings of each span of steps: one with its least values, and one with its greatest."""
    kept: list[MachineReading] = []
    for _, group in groupby(zip(readings, spans_of([each.step for each in readings], spans)), key=lambda pair: pair[1]):
        span = [reading for reading, _ in group]
        kept += span if len(span) <= 2 else [_reduce(span, 0, min), _reduce(span, len(span) // 2, max)]
    return kept


def spans_of(steps: Sequence[float], spans: int) -> list[int]:
    """Return the index of the span of each step, for ``spans`` equal spans."""
    least = min(steps)
    width = (max(steps) - least + 1) / spans
    return [int((step - least) / width) for step in steps]


def _reduce(readings: Sequence[MachineReading], at: int, pick: Callable[[Sequence[float]], float]) -> MachineReading:
    names = dict.fromkeys(name for each in readings for name in each.values)
    values = {name: pick([each.values[name] for each in readings if name in each.values]) for name in names}
    return MachineReading(readings[at].time_s, readings[at].step, values)
