"""Compares runs: differences of recipe, plan and provenance, and the outcomes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainwright.plan.amounts import human_seconds
from trainwright.report.chart import Coordinate, parallel_coordinates_svg
from trainwright.report.pages.rows import column, seconds
from trainwright.report.pages.view import RunView, flat, number
from trainwright.runs.json_values import JsonValue, strict

SEED_KEYS = {"seed", "name", "folder"}
"""Keys in which runs of one recipe may differ. Such runs are summarized together, with their spread."""
MIN_RUNS_FOR_COORDINATES = 3
MAX_COORDINATES = 8
"""Maximum number of settings that become axes of parallel coordinates."""
MEASURED_KEYS = ("notes", "header", "step_s", "wait_s", "initial_loss", "expected_loss", "seconds", "ends_in_s")
"""Plan keys that each start measures again, and the header, which repeats the recipe as text."""
SMOOTHING_ROWS = 15
"""The number of log rows whose median is compared when nothing was validated."""


@dataclass(frozen=True)
class Difference:
    """A setting by its dotted path, and its value in each run, in the order of the runs."""

    path: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run. ``reached_s`` and ``reached_step``: when its loss first reached the target."""

    name: str
    state: str
    verdict: str
    step: int
    seconds: float
    loss: float | None
    val_loss: float | None
    best: float | None
    reached_step: int | None
    reached_s: float | None
    findings: tuple[str, ...]


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a loss over runs of one recipe that differ by their seed."""

    names: tuple[str, ...]
    measure: str
    mean: float
    deviation: float


@dataclass(frozen=True)
class RunComparison:
    """A comparison of several runs. ``recipe``, ``plan`` and ``provenance`` are None if a run has none.

    ``target`` is the lowest loss that all runs reached, of the kind ``measure``; None if there is none.
    """

    names: tuple[str, ...]
    recipe: tuple[Difference, ...] | None
    plan: tuple[Difference, ...] | None
    provenance: tuple[Difference, ...] | None
    outcomes: tuple[RunOutcome, ...]
    spreads: tuple[Spread, ...]
    target: float | None
    measure: str
    first_differences: tuple[str, ...] = ()
    """For each run after the first, a text: the first recorded step at which it differs from the first run."""
    exit_code = 0

    @classmethod
    def of(cls, views: Sequence[RunView]) -> RunComparison:
        validated = all(view.evaluations for view in views)
        curves = [_validation_curve(view) if validated else _training_curve(view) for view in views]
        least = [min((loss for _, _, loss in curve), default=math.nan) for curve in curves]
        target = max(least) if least and not any(map(math.isnan, least)) else None
        return cls(
            tuple(view.name for view in views),
            _of_recipes(views),
            _of_plans(views),
            _of_provenance(views),
            tuple(_outcome(view, curve, target) for view, curve in zip(views, curves)),
            tuple(_spreads(views)),
            target,
            "validation loss"
            if validated
            else f"training loss (median of {SMOOTHING_ROWS} records; of a long log means)",
            tuple(_parting(views[0], view) for view in views[1:]),
        )

    @property
    def parallel(self) -> str:
        """Parallel coordinates of three or more runs as SVG: their settings that differ, and the loss; "" otherwise."""
        losses = [each.loss if each.best is None else each.best for each in self.outcomes]
        values = [math.nan if each is None else each for each in losses]
        varied = [each for each in self.recipe or () if each.path not in SEED_KEYS][:MAX_COORDINATES]
        if len(self.names) < MIN_RUNS_FOR_COORDINATES or not varied or not all(map(math.isfinite, values)):
            return ""
        metric = "loss" if any(each.best is None for each in self.outcomes) else "best validation loss"
        axes = [_coordinate(each) for each in varied]
        return parallel_coordinates_svg(axes, values, metric=metric, is_smaller_better=True)

    def lines(self) -> list[str]:
        sections = (("recipe", self.recipe), ("plan", self.plan), ("provenance", self.provenance))
        lines = [f"{len(self.names)} runs: {', '.join(self.names)}"]
        for title, differences in sections:
            lines.append(f"{title}: {_summary(differences)}")
            lines += [f"  {each.path}: {' | '.join(each.values)}" for each in differences or ()]
        lines += [f"first difference: {each}" for each in self.first_differences]
        lines.append("outcomes")
        lines += [f"  {line}" for each in self.outcomes for line in self._outcome_lines(each)]
        for each in self.spreads:
            names = ", ".join(each.names)
            lines.append(
                f"  {names}: {each.measure} {each.mean:.4g} +- {each.deviation:.2g} over {len(each.names)} runs"
            )
        return lines

    def _outcome_lines(self, each: RunOutcome) -> Iterator[str]:
        val = "" if each.val_loss is None else f", validation {number(each.val_loss)} (best {number(each.best)})"
        yield (
            f"{each.name}: {each.state} ({each.verdict}) at step {each.step:,} after {human_seconds(each.seconds)}, "
            f"loss {number(each.loss)}{val}"
        )
        if self.target is not None and each.reached_s is not None:
            at = f"step {each.reached_step:,}, after {human_seconds(each.reached_s)}"
            yield f"  {self.measure} {self.target:.4g} reached at {at}"
        if each.findings:
            yield f"  findings: {', '.join(each.findings)}"

    def to_json(self) -> Mapping[str, JsonValue]:
        return {name: strict(value) for name, value in vars(self).items()}


def _coordinate(row: Difference) -> Coordinate:
    """Return the axis of a setting: numbers, on a log scale if they span a factor of 20 or more, or else names."""
    try:
        numbers = [float(value) for value in row.values]
    except ValueError:
        return Coordinate(row.path, row.values, sorted(set(row.values)))
    if not all(map(math.isfinite, numbers)):
        return Coordinate(row.path, row.values, sorted(set(row.values)))
    return Coordinate(row.path, numbers, is_log=min(numbers) > 0 and max(numbers) >= 20 * min(numbers))


def _parting(first: RunView, other: RunView) -> str:
    """Return the first step that both logs have and in which a number differs in any bit."""
    rows = [view.log.rows for view in (first, other)]
    steps = [column(each, "step") for each in rows]
    common, *places = np.intersect1d(steps[0], steps[1], return_indices=True)
    if not len(common):
        return f"{other.name}: no step is in the logs of both"
    differs = {}
    for name in ("lr", "loss", "grad_norm", "samples"):
        one, two = (column(each, name)[place] for each, place in zip(rows, places))
        differs[name] = (one != two) & ~(np.isnan(one) | np.isnan(two))
    every = np.any(list(differs.values()), axis=0)
    if not every.any():
        return f"{other.name}: none in {len(common):,} common steps up to {int(common[-1]):,}"
    at = int(np.argmax(every))
    parts = [
        f"{name} {column(rows[0], name)[places[0][at]]:.9g} | {column(rows[1], name)[places[1][at]]:.9g}"
        for name, where in differs.items()
        if where[at]
    ]
    before = f", the same in {at:,} recorded steps before" if at else ""
    return f"{other.name}: step {int(common[at]):,}: {', '.join(parts)}{before}"


def _summary(differences: Sequence[Difference] | None) -> str:
    return "not every run has one" if differences is None else "differs in" if differences else "the same"


def _of_recipes(views: Sequence[RunView]) -> tuple[Difference, ...] | None:
    if not all(view.recipe for view in views):
        return None
    from trainwright.plan.resume_changes import recipe_differences  # imports recipes

    return _table([recipe_differences(views[0].recipe, view.recipe) for view in views[1:]])


def _of_provenance(views: Sequence[RunView]) -> tuple[Difference, ...] | None:
    if not all(view.provenance for view in views):
        return None
    from trainwright.plan.resume_changes import compare_provenance

    pairs = [compare_provenance(views[0].provenance, view.provenance) for view in views[1:]]
    return _table([{each.path: (each.before, each.after) for each in changes} for changes in pairs])


def _table(pairs: Sequence[Mapping[str, tuple[str, str]]]) -> tuple[Difference, ...]:
    """Return one row per path from the differences (first run, other run) of each other run."""
    first = {path: before for each in reversed(pairs) for path, (before, _) in each.items()}
    paths = dict.fromkeys(path for each in pairs for path in each)
    return tuple(
        Difference(path, (first[path], *(each[path][1] if path in each else first[path] for each in pairs)))
        for path in paths
    )


def _of_plans(views: Sequence[RunView]) -> tuple[Difference, ...] | None:
    if not all(view.plan for view in views):
        return None
    plans = [dict(flat({key: value for key, value in view.plan.items() if key not in MEASURED_KEYS})) for view in views]
    paths = dict.fromkeys(path for plan in plans for path in plan if path)
    rows = (Difference(path, tuple(plan.get(path, "-") for plan in plans)) for path in paths)
    return tuple(row for row in rows if len(set(row.values)) > 1)


Curve = Sequence[tuple[int, float, float]]
"""Step, seconds and loss."""


def _validation_curve(view: RunView) -> Curve:
    sessions = view.log.sessions
    return [
        (each.step, sum(max(0.0, min(each.time_s, end_s) - begin_s) for begin_s, end_s in sessions), each.loss)
        for each in view.evaluations
        if math.isfinite(each.loss)
    ]


def _training_curve(view: RunView) -> Curve:
    """Return medians, because single peaks and dips say nothing about progress. A thinned log has means instead."""
    if view.log.is_thinned:
        means = view.log.means.columns()
        there = seconds(view.log.rows, view.log.sessions)
        times = np.interp(means["step"], column(view.log.rows, "step"), there)
        curve = zip(means["step"].astype(int).tolist(), times.tolist(), means["loss"].tolist())
        return [point for point in curve if math.isfinite(point[2])]
    rows = view.log.rows
    rows = rows[np.isfinite(column(rows, "loss"))]
    if len(rows) < SMOOTHING_ROWS:
        return []
    losses = np.median(np.lib.stride_tricks.sliding_window_view(column(rows, "loss"), SMOOTHING_ROWS), axis=1)
    steps, times = column(rows, "step")[SMOOTHING_ROWS - 1 :], seconds(rows, view.log.sessions)[SMOOTHING_ROWS - 1 :]
    return [(int(step), float(time_s), float(loss)) for step, time_s, loss in zip(steps, times, losses)]


def _outcome(view: RunView, curve: Curve, target: float | None) -> RunOutcome:
    there = next(((step, time_s) for step, time_s, loss in curve if target is not None and loss <= target), None)
    return RunOutcome(
        view.name,
        view.state,
        view.verdict.word,
        view.step,
        view.seconds,
        view.loss,
        view.val_loss,
        view.best,
        there[0] if there else None,
        there[1] if there else None,
        tuple(each.code for each in view.findings),
    )


def _spreads(views: Sequence[RunView]) -> Iterator[Spread]:
    """Yield the spread of each group of runs whose recipes differ only by the seed."""
    groups: list[list[RunView]] = []
    for view in views:
        same = [group for group in groups if group[0].recipe and view.recipe and _is_same(group[0], view)]
        if same:
            same[0].append(view)
        else:
            groups.append([view])
    for group in groups:
        for measure in ("val_loss", "best", "loss"):
            values = [getattr(view, measure) for view in group]
            if len(group) > 1 and all(each is not None and math.isfinite(each) for each in values):
                words = {"val_loss": "validation loss", "best": "best validation loss", "loss": "loss"}[measure]
                yield Spread(
                    tuple(view.name for view in group), words, statistics.mean(values), statistics.stdev(values)
                )


def _is_same(one: RunView, other: RunView) -> bool:
    from trainwright.plan.resume_changes import recipe_differences

    return recipe_differences(one.recipe, other.recipe).keys() <= SEED_KEYS
