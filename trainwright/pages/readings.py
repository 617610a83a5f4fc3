"""Readings of the machine over a run, kept in bounded memory however long it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.runlog.records import Telemetry

MOST = 2000
DRAWN = 300
_GROUP = 4


@dataclass(frozen=True)
class MachineReading:
    """What was read at one time, by name. A name that was not read is not there."""

    time_s: float
    step: int
    values: Mapping[str, float]


class Readings:
    """The readings of a run in their order. Of MOST and more each four become two: the least and the greatest."""

    def __init__(self) -> None:
        self.kept: list[MachineReading] = []
        self.count = 0

    def take(self, record: Telemetry) -> None:
        self.count += 1
        self.kept.append(MachineReading(record.time_s, record.step, record.values))
        if len(self.kept) >= MOST:
            self.kept = halved(self.kept)

    def go_back_to(self, step: int) -> None:
        """Forgets what was read after ``step``, which is done again."""
        self.kept = [each for each in self.kept if each.step <= step]

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Columns to be drawn: ``time_s``, ``step``, and one for each name. NaN where it was not read."""
        shown = self.kept
        while len(shown) > DRAWN:
            shown = halved(shown)
        names = dict.fromkeys(name for each in shown for name in each.values)
        columns = {"time_s": [each.time_s for each in shown], "step": [float(each.step) for each in shown]}
        columns |= {name: [each.values.get(name, np.nan) for each in shown] for name in names}
        return {name: np.array(values, dtype=np.float64) for name, values in columns.items()}


def halved(readings: Sequence[MachineReading]) -> list[MachineReading]:
    """Half as many: of each four a reading of the least values, and one of the greatest."""
    kept: list[MachineReading] = []
    for first in range(0, len(readings), _GROUP):
        four = readings[first : first + _GROUP]
        for pick, at in ((min, 0), (max, len(four) // 2)):
            kept.append(MachineReading(four[at].time_s, four[at].step, _picked(four, pick)))
    return kept


def _picked(readings: Sequence[MachineReading], pick: Callable[[Sequence[float]], float]) -> dict[str, float]:
    names = dict.fromkeys(name for each in readings for name in each.values)
    return {name: pick([each.values[name] for each in readings if name in each.values]) for name in names}
