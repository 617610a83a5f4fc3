"""Named figures of a run: metrics of training and validation, and values from ``tw.log`` and ``watch.log``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

import numpy as np

from trainwright.report.pages.readings import MachineReading, Readings
from trainwright.report.pages.rows import as_json
from trainwright.runs.json_values import JsonValue, plain
from trainwright.runs.records import Evaluated, Logged

_PROBED = re.compile(rb'\n\{"kind":"step","time_s":([^,]+),"step":(\d+)[^\n]*?"probed":(\{"[^\n]+?\}),"fractions"')
_SETS = ("train", "training", "val", "valid", "validation", "test", "eval", "evaluation")
_PREFIXED = re.compile(rf"({'|'.join(_SETS)})[_/.](.+)")
TRAIN, VALIDATION = "train", "validation"


class Figures:
    """The figures of the log read so far, in bounded memory."""

    def __init__(self) -> None:
        self._training = Readings()
        self._validation = Readings()
        self._reported = Readings()
        self._names_of_sets: set[str] = set()

    @property
    def count(self) -> int:
        """The number of records added."""
        return sum(each.count for each in (self._training, self._validation, self._reported))

    def take_lines(self, lines: bytes) -> None:
        """Add the step records in these lines, each of which begins with a newline."""
        if b'"probed":{"' not in lines:
            return
        for time_s, step, values in _PROBED.findall(lines):
            self._take(self._training, float(time_s), int(step), json.loads(values))

    def take(self, record: Evaluated | Logged) -> None:
        """Add a record of another kind."""
        if isinstance(record, Logged):
            self._take(self._reported, record.time_s, record.step, record.figures)
            return
        self._names_of_sets |= {name.removesuffix(".loss") for name in record.metrics if name.endswith(".loss")}
        if record.metrics:
            self._take(self._validation, record.time_s, record.step, record.metrics)

    def _take(self, readings: Readings, time_s: float, step: int, values: Mapping[str, object]) -> None:
        numbers = {name: plain(value) for name, value in values.items()}
        floats = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        # on a page, infinity stands for "not finite" and NaN for "missing"
        known = {name: value if math.isfinite(value) else math.inf for name, value in floats.items()}
        readings.add(MachineReading(time_s, step, known))

    def go_back_to(self, step: int) -> None:
        """Drop values after ``step``, from which the run continues again."""
        for each in (self._training, self._validation, self._reported):
            each.go_back_to(step)

    def to_json(self) -> list[JsonValue]:
        """Return one chart for each figure, with a series for each set it was measured on, training first."""
        charts: dict[str, dict[str, JsonValue]] = {}
        for readings, on in ((self._training, TRAIN), (self._validation, VALIDATION), (self._reported, "")):
            columns = readings.columns()
            for name in sorted(columns.keys() - {"time_s", "step"}):
                chart, label = self._chart_of(name, on)
                known = ~np.isnan(columns[name])
                series = as_json({"step": columns["step"][known], "value": columns[name][known]})
                charts.setdefault(chart, {})[label] = {**series, "label": label, "is_evaluation": on != TRAIN}
        return [
            {"name": chart, "series": list(series.values())}
            for chart, series in sorted(charts.items())
            if chart != "loss" or len(series) > 1  # a single series is in the chart of the loss
        ]

    def _chart_of(self, name: str, on: str) -> tuple[str, str]:
        """Return the chart of a figure, and the name of its curve there."""
        head, _, rest = name.partition(".")
        if rest and head in self._names_of_sets:
            return rest, head
        if not on and (found := _PREFIXED.fullmatch(name)):
            return found[2], found[1]
        return name, on or name
