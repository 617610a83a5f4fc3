"""The curves of a run as rows of numbers, thinned so that every peak, dip and non-finite value remains.

A row is one record of a step. NaN: the record has no value. Infinity: the value is not finite.

Smoothed curves are means over equal spans of steps, over all records: thinned rows cannot give them, because they keep
only extremes. Readings of the machine are kept in bounded memory, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainwright.runs.json_values import JsonValue

COLUMNS = (
    "order",
    "time_s",
    "step",
    "loss",
    "grad_norm",
    "lr",
    "samples",
    "tokens",
    "step_s",
    "wait_s",
    "skipped",
    "mem_bytes",
)
"""``order`` numbers the rows as they were read: a page requests only the rows after those it has."""
PEAKS = ("loss", "grad_norm", "lr", "step_s", "wait_s", "mem_bytes")
"""For each of these columns, thinning keeps the least, the greatest and the first non-finite value of each bucket."""
NOT_FINITE = "n"
"""The JSON value of a number that is not finite; null is a missing one."""

Rows: TypeAlias = NDArray[np.float64]
"""One row per record, one column for each of COLUMNS."""


def column(rows: Rows, name: str) -> NDArray[np.float64]:
    """Return the values of the column ``name`` of `COLUMNS`."""
    return rows[:, COLUMNS.index(name)]


def no_rows() -> Rows:
    """Return an empty table."""
    return np.empty((0, len(COLUMNS)))


def by_step(rows: Rows) -> Rows:
    """Return the rows in the order of steps; records of the same step keep their order."""
    steps = column(rows, "step")
    return rows if bool(np.all(steps[1:] >= steps[:-1])) else rows[np.argsort(steps, kind="stable")]


def thin_rows(rows: Rows, buckets: int) -> Rows:
    """Return the rows to draw: the extremes of each of ``buckets`` equal spans of steps."""
    if len(rows) <= 4 * buckets:
        return rows
    steps = column(rows, "step")
    bucket = ((steps - steps[0]) * (buckets / (steps[-1] - steps[0] + 1.0))).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    rank = np.cumsum(np.diff(bucket, prepend=-1) > 0) - 1
    keep = np.zeros(len(rows), dtype=bool)
    keep[starts] = keep[-1] = True
    for name in PEAKS:
        values = column(rows, name)
        finite = np.isfinite(values)
        low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
        keep[_first_of_each(rank, finite & (low == np.minimum.reduceat(low, starts)[rank]))] = True
        keep[_first_of_each(rank, finite & (high == np.maximum.reduceat(high, starts)[rank]))] = True
        keep[_first_of_each(rank, np.isinf(values))] = True
    return rows[keep]


def _first_of_each(rank: NDArray[np.int64], wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the index of the first wanted row of each bucket that has one."""
    found = np.flatnonzero(wanted)
    _, first = np.unique(rank[found], return_index=True)
    return found[first]


def seconds(rows: Rows, sessions: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    """Return the time of each row since the start of the run, without the time between a death and its resume.

    ``sessions`` are the beginning and the last record of each process, in Unix time, the oldest first.
    """
    times = column(rows, "time_s")
    passed = np.zeros(len(rows))
    for begin_s, end_s in sessions:
        passed += np.clip(times - begin_s, 0.0, max(0.0, end_s - begin_s))
    return np.maximum.accumulate(passed) if len(passed) else passed


def fill_missing(steps: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``values`` over ``steps``, with missing ones between known ones interpolated."""
    known = np.isfinite(values)
    return np.interp(steps, steps[known], values[known], np.nan, np.nan) if known.any() else values


def as_json(columns: Mapping[str, NDArray[np.float64]]) -> dict[str, list[JsonValue]]:
    """Return columns for a page, with six significant digits; empty columns are left out."""
    return {name: _plain(values) for name, values in columns.items() if not np.isnan(values).all()}


def _plain(values: NDArray[np.float64]) -> list[JsonValue]:
    finite = np.isfinite(values)
    size = np.abs(np.where(finite & (values != 0), values, 1.0))
    digits = 9 if _counts(values) else 6
    factor = 10.0 ** np.clip(digits - 1 - np.floor(np.log10(size)), 0, 300)
    short = np.where(finite & (size < 1e200), np.round(np.where(finite, values, 0.0) * factor) / factor, values)
    plain: list[JsonValue] = [int(each) if each.is_integer() and abs(each) < 2**53 else each for each in short.tolist()]
    for index in np.flatnonzero(~finite):
        plain[index] = None if np.isnan(values[index]) else NOT_FINITE
    return plain


def _counts(values: NDArray[np.float64]) -> bool:
    """Return True for values that only grow, as steps and seconds do: six digits would make some of them equal."""
    return bool(np.isfinite(values).all() and np.all(np.diff(values) >= 0))


AVERAGED_COLUMNS = ("loss", "grad_norm", "step_s", "wait_s")
MAX_SPANS, MAX_SPANS_DRAWN = 512, 64
MAX_FINITE = 1e200
"""Greater values count as not finite, because their sum may overflow."""
_KERNEL = np.array([0.25, 0.5, 0.25])


class SpanMeans:
    """Sums and counts of the finite values of each span of steps. Beyond MAX_SPANS spans, neighbours are merged."""

    def __init__(self) -> None:
        self._width = 1
        self._sums, self._counts, self._broken = (np.zeros((MAX_SPANS, len(AVERAGED_COLUMNS))) for _ in range(3))

    def take(self, rows: Rows) -> None:
        if not len(rows):
            return
        steps = column(rows, "step")
        while steps.max() >= self._width * MAX_SPANS:
            self._width *= 2
            self._sums, self._counts, self._broken = (_wider(each) for each in (self._sums, self._counts, self._broken))
        span = np.maximum(0, steps // self._width).astype(np.int64)
        values = rows[:, [COLUMNS.index(name) for name in AVERAGED_COLUMNS]]
        finite = np.abs(values) < MAX_FINITE
        added = ((self._sums, np.where(finite, values, 0.0)), (self._counts, finite))
        for table, each in (*added, (self._broken, np.abs(values) >= MAX_FINITE)):
            for index, weights in enumerate(each.T):
                table[:, index] += np.bincount(span, weights, minlength=MAX_SPANS)

    def multiply(self, name: str, factor: float) -> None:
        self._sums[:, AVERAGED_COLUMNS.index(name)] *= factor

    def go_back_to(self, step: int, rows: Rows) -> None:
        """Drop values after ``step``. The span of ``step`` is summed again from ``rows``, the rows up to ``step``."""
        first = step // self._width
        for each in (self._sums, self._counts, self._broken):
            each[first:] = 0
        self.take(rows[column(rows, "step") >= first * self._width])

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the middle of each non-empty span, and the mean over it and, with half weight, its two neighbours.

        NaN: no value. Infinity: no finite value.
        """
        sums = self._sums
        counts = self._counts
        broken = self._broken
        width = self._width
        while np.flatnonzero(counts.any(1)).max(initial=0) >= MAX_SPANS_DRAWN:
            sums = _wider(sums)
            counts = _wider(counts)
            broken = _wider(broken)
            width = 2 * width
        seen = counts.any(1) | broken.any(1)
        smooth, weight = _smooth(sums), _smooth(counts)
        for end in (
            np.flatnonzero(counts.any(1))[[0, -1]] if counts.any() else ()
        ):  # the first and last span are not smoothed: a neighbour on one side only would shift them
            smooth[end], weight[end] = sums[end], counts[end]
        means = np.where(counts > 0, smooth / np.maximum(weight, 1e-9), np.where(broken > 0, np.inf, np.nan))
        middles = (np.arange(len(means)) * width + (width - 1) // 2).astype(np.float64)
        return {"step": middles[seen], **{name: means[seen, index] for index, name in enumerate(AVERAGED_COLUMNS)}}


def _wider(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    half = spans[0::2] + spans[1::2]
    return np.concatenate([half, np.zeros_like(half)])


def _smooth(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.convolve(each, _KERNEL, mode="same") for each in spans.T], axis=1)


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

    def add(self, reading: MachineReading) -> None:
        self.count += 1
        self.kept.append(reading)
        if len(self.kept) > MAX_READINGS:
            self.kept = extremes(self.kept, MAX_READINGS // 4)

    def go_back_to(self, step: int) -> None:
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
