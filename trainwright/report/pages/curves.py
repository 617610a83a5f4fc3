"""The data of the charts of a run's page."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from trainwright.report.pages import rows
from trainwright.report.pages.rows import Rows, column
from trainwright.report.pages.view import RunView
from trainwright.runs.json_values import JsonValue
from trainwright.runs.records import Started

BUCKETS = 600
"""Number of equal intervals of steps, whose minima and maxima are drawn. A page divides them among its runs."""
AXES = ("seconds", "samples", "tokens")
"""Alternatives to steps for the x axis."""

Columns = dict[str, NDArray[np.float64]]


def curves_of(view: RunView, buckets: int = BUCKETS, *, after: int = 0) -> dict[str, JsonValue]:
    """Return the data of the charts, thinned. With ``after``, return all rows except the first ``after`` read."""
    log = view.log
    table = log.rows if after else rows.thin_rows(log.rows, buckets)
    columns = _columns(table, view)
    new = column(table, "order") > after
    return {
        "name": view.name,
        "log": log.name,
        "read": log.read_rows,
        "is_thinned": log.is_thinned or len(columns["step"]) < len(log.rows),
        "columns": rows.as_json({name: values[new] for name, values in columns.items()}),
        "means": _means(view, columns),
        "evaluations": _evaluations(view, columns),
        "figures": log.figures.to_json(),
        "pins": [vars(pin) for pin in view.pins],
        "resumes": log.counts[Started],
        "references": dict(view.references),
        "planned_bytes": None if view.plan.get("device") == "cpu" else view.planned_bytes,
    }


def readings_of(view: RunView) -> JsonValue:
    """Return the readings of the machine, thinned, over the same axes."""
    columns = view.log.readings.columns()
    if not len(columns["step"]):
        return {}
    placed = _columns(view.log.rows, view)
    return rows.as_json({**columns, **_on_axes(columns["step"], placed)})


def _columns(table: Rows, view: RunView) -> Columns:
    steps = column(table, "step")
    columns = {name: column(table, name) for name in rows.COLUMNS if name not in ("order", "time_s")}
    columns["seconds"] = rows.seconds(table, view.log.sessions)
    columns["samples"], columns["tokens"] = (rows.fill_missing(steps, columns[each]) for each in ("samples", "tokens"))
    return columns


def _means(view: RunView, columns: Columns) -> JsonValue:
    means = view.log.means.columns()
    newest = view.step
    means["step"] = np.minimum(means["step"], newest)
    return rows.as_json({**means, **_on_axes(means["step"], columns)})


def _on_axes(steps: NDArray[np.float64], columns: Columns) -> Columns:
    there = columns["step"]
    return {name: np.interp(steps, there, columns[name]) for name in AXES} if len(there) else {}


def _evaluations(view: RunView, columns: Columns) -> JsonValue:
    seen = view.evaluations
    if not seen:
        return {}
    steps = np.array([float(each.step) for each in seen])
    losses = np.array([each.loss if math.isfinite(each.loss) else np.inf for each in seen])
    return rows.as_json({"step": steps, "loss": losses, **_on_axes(steps, columns)})
