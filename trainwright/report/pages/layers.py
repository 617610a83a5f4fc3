"""Statistics by layer over a run, as heat maps, kept in bounded memory."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.report.pages.rows import spans_of
from trainwright.runs.files import parse_json
from trainwright.runs.json_values import NOT_IN_JSON, JsonValue
from trainwright.runs.records import OUTPUT_GRAD_LOG2

MAPS = {"grad_norm": "gradient norm", "update_ratio": "update / weight", "act_std": "activations, deviation"}
"""The statistics of a record that are drawn, with their titles. Each holds a number for each layer."""
OUTPUT_GRAD_NORM = {"norm": "gradient of outputs, norm"}
NAN_IS_MISSING = ("act_std", "norm", "log2")
"""Statistics in which NaN means that nothing was recorded; in others it means that the value was not finite."""
MAX_HISTOGRAMS = 12
POWERS = [f"2^{power}" for power in OUTPUT_GRAD_LOG2[::-1]]
MAX_STEPS = 1024
MAX_STEPS_DRAWN = 160
MAX_LAYERS = 400
NOT_FINITE_CODE = 65535
MISSING_CODE = 65534
MAX_CODE = 65533
"""The codes in a map of a value that is not finite and of a missing one, and the largest value of its log scale."""

_UNUSED = re.compile(rb',"(?:(?:act_)?log2":\[\[[0-9,\[\]]*\]\]|act_(?:mean|max)":\[[^\]]*\])')
"""The largest part of a record: histograms, and statistics that have no map."""

Row = NDArray[np.float64]
Rows = dict[str, list[Row]]
Grid = NDArray[np.float64]
"""A row for each step, a column for each layer. NaN: missing. Infinity: not finite."""


class LayerMaps:
    """The layer records as ``maps``. Beyond MAX_STEPS, the greatest values of equal spans of steps are kept."""

    def __init__(self, maps: Mapping[str, str] = MAPS) -> None:
        self.count, self._maps = 0, maps
        self._names: tuple[str, ...] = ()
        self._steps: list[float] = []
        self._rows: Rows = {}

    def take(self, line: bytes) -> None:
        try:
            record = parse_json(_UNUSED.sub(b"", line).decode())
            names, step = record.get("layers") or self._names, float(record["step"])
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        self.add(names, step, record)

    def add(self, names: object, step: float, values: Mapping[str, object]) -> None:
        """Add the values of ``step`` by statistic, one for each of ``names``; invalid records are ignored."""
        if not isinstance(names, list | tuple) or len(names) > MAX_LAYERS or not 0 <= step < 2**53:
            return
        if tuple(map(str, names)) != self._names:  # another model, or the first record
            self._names = tuple(map(str, names))
            self._steps = []
            self._rows = {}
        self.count += 1
        self._steps.append(step)
        for name in self._maps:
            lost = name in NAN_IS_MISSING
            self._rows.setdefault(name, []).append(_row(values.get(name), len(self._names), lost=lost))
        if len(self._steps) > MAX_STEPS:
            self._steps, self._rows = greatest(self._steps, self._rows, MAX_STEPS // 2)

    def go_back_to(self, step: int) -> None:
        """Drop values after ``step``, from which the run continues again."""
        kept = [index for index, each in enumerate(self._steps) if each <= step]
        self._steps = [self._steps[index] for index in kept]
        self._rows = {name: [rows[index] for index in kept] for name, rows in self._rows.items()}

    def to_json(self) -> dict[str, JsonValue]:
        """Return layers, steps, and each map with its bounds as 16-bit numbers on a log scale, in base64."""
        if not self._steps or not self._names:
            return {}
        steps, rows = self._steps, self._rows
        if len(steps) > MAX_STEPS_DRAWN:
            steps, rows = greatest(steps, rows, MAX_STEPS_DRAWN)
        maps: list[JsonValue] = []
        for name, title in self._maps.items():
            if (drawn := _draw(np.array(rows[name]))) is not None:
                maps.append({"name": title, **drawn})
        shown: Sequence[JsonValue] = [int(each) for each in steps]
        return {"layers": list(self._names), "steps": list(shown), "maps": maps}


class OutputGradMaps:
    """The records of output gradients: a map of norms, and a histogram map for each of the first modules."""

    def __init__(self) -> None:
        self.count = 0
        self._norms, self._histograms = LayerMaps(OUTPUT_GRAD_NORM), dict[str, LayerMaps]()
        self._names: tuple[str, ...] = ()

    def take(self, line: bytes) -> None:
        self._norms.take(line)
        self.count += 1
        try:
            record = parse_json(line.decode())
            names, step = tuple(map(str, record.get("layers") or self._names)), float(record["step"])
            bins = [np.array(each, dtype=float) for each in record["log2"]]
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        if names != self._names:
            self._names, self._histograms = names, {}
        for name, each in list(zip(names, bins))[:MAX_HISTOGRAMS]:
            maps = self._histograms.setdefault(name, LayerMaps({"log2": f"gradient of {name}, % by size"}))
            maps.add(POWERS, step, {"log2": _by_power(each)})

    def go_back_to(self, step: int) -> None:
        for maps in (self._norms, *self._histograms.values()):
            maps.go_back_to(step)

    def to_json(self) -> list[JsonValue]:
        """Return maps in the format of ``LayerMaps``, the norms first."""
        return [drawn for maps in (self._norms, *self._histograms.values()) if (drawn := maps.to_json())]


def _by_power(bins: Row) -> list[float]:
    """Return the percentages for POWERS from a histogram without its empty ends; NaN for none."""
    row = np.zeros(len(POWERS))
    if bins.ndim == 1 and len(bins) > 1 and 0 <= bins[0] < len(row):
        begin = int(bins[0])
        row[begin : begin + len(bins) - 1] = bins[1 : len(row) - begin + 1]
    return [float(value) for value in np.where(row > 0, row, np.nan)[::-1]]


def greatest(steps: Sequence[float], rows: Mapping[str, Sequence[Row]], spans: int) -> tuple[list[float], Rows]:
    """Return one row for each span of steps with its greatest values, so that peaks and non-finite values remain."""
    span = np.array(spans_of(steps, spans))
    starts = np.flatnonzero(np.diff(span, prepend=-1))
    joined = {name: list(np.fmax.reduceat(np.array(each), starts, axis=0)) for name, each in rows.items()}
    return [steps[start] for start in starts.tolist()], joined


def _row(values: object, count: int, *, lost: bool) -> Row:
    """Return a row of numbers. ``lost``: NaN means that nothing was recorded, otherwise that it was not finite."""
    row = np.full(count, np.nan)
    if isinstance(values, list) and len(values) == count:
        if set(map(type, values)) == {float}:  # the usual case; JSON numbers are finite
            row[:] = values
            return row
        for index, value in enumerate(values):
            number = NOT_IN_JSON.get(value, np.nan) if isinstance(value, str) else value
            if isinstance(number, int | float):
                row[index] = np.inf if abs(number) == np.inf or (number != number and not lost) else number
    return row


def _draw(grid: Grid) -> Mapping[str, JsonValue] | None:
    known = np.isfinite(grid) & (grid > 0)
    if not known.any() and not np.isinf(grid).any():
        return None
    low, high = (float(bound) for bound in (grid[known].min(), grid[known].max())) if known.any() else (1.0, 1.0)
    room = np.log(high) - np.log(low) or 1.0
    scaled = np.where(known, (np.log(np.where(known, grid, low)) - np.log(low)) / room * MAX_CODE, 0.0)
    codes = np.where(np.isinf(grid), NOT_FINITE_CODE, np.where(np.isnan(grid), MISSING_CODE, np.round(scaled)))
    return {"low": low, "high": high, "codes": base64.b64encode(codes.astype("<u2").tobytes()).decode()}
