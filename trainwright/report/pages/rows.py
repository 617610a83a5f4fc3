"""The curves of a run as rows of numbers, thinned so that every peak, dip and non-finite value remains.

A row is one record of a step. NaN: the record has no value. Infinity: the value is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    whole: list[JsonValue] = [int(each) if each.is_integer() and abs(each) < 2**53 else each for each in short.tolist()]
    for index in np.flatnonzero(~finite):
        whole[index] = None if np.isnan(values[index]) else NOT_FINITE
    return whole


def _counts(values: NDArray[np.float64]) -> bool:
    """Return True for values that only grow, as steps and seconds do: six digits would make some of them equal."""
    return bool(np.isfinite(values).all() and np.all(np.diff(values) >= 0))
