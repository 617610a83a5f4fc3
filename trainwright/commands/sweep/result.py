"""The table of a sweep, and the files that it writes: sweep.json, best.yaml and sweep.html."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainwright.commands.sweep.spec import Sweep, label_of
from trainwright.commands.sweep.study import TrialRow
from trainwright.plan.amounts import human_seconds
from trainwright.recipe import dump_masked, load
from trainwright.runs.json_values import strict
from trainwright.runs.printing import figure, in_columns
from trainwright.runs.storage import write_atomically

TABLE = "sweep.json"
BEST = "best.yaml"
PAGE = "sweep.html"
INTERRUPTED = "interrupted"
MAX_REASON_LENGTH = 160
_ORDER = ("finished", "pruned", "diverged", "failed", "stopped")


@dataclass(frozen=True, repr=False)
class SweepResult:
    """The trials of a sweep, the best first.

    ``importance`` is for each varied path the fraction of the variation of the values that it explains. ``why_ended``
    is the reason if trials are left, else "". The command ``train_best`` trains the recipe of the best trial; "" if no
    trial finished.
    """

    folder: Path
    metric: str
    mode: str
    rows: tuple[TrialRow, ...]
    importance: Mapping[str, float] = field(default_factory=dict)
    why_ended: str = ""
    train_best: str = ""

    @property
    def best(self) -> TrialRow | None:
        """The best trial that finished; None if none did."""
        return self.rows[0] if self.rows and self.rows[0].ended == "finished" else None

    @property
    def best_recipe(self) -> Path | None:
        """The file with the recipe of the best trial."""
        return self.folder / BEST if self.best else None

    @property
    def exit_code(self) -> int:
        """75 after a signal, 1 if no trial finished, else 0."""
        return 75 if self.why_ended == INTERRUPTED else 0 if self.best else 1

    def lines(self) -> list[str]:
        paths = list(self.rows[0].params) if self.rows else []
        head = ("trial", *paths, self.metric, "steps", "time", "ended", "findings")
        lines = in_columns([head, *(_cells(row) for row in self.rows)])
        if self.importance:
            parts = (f"{path} {part:.0%}" for path, part in self.importance.items())
            lines.append(f"importance  {', '.join(parts)}")
        lines += [f"ended       {self.why_ended}"] if self.why_ended else []
        lines.append(f"page        {self.folder / PAGE}")
        folder = shlex.quote(str(self.folder))
        if self.best_recipe:
            lines.append(f"best        {self.best_recipe}")
            lines.append(f"next        {self.train_best}")
        if self.why_ended and all(row.ended == "failed" for row in self.rows):
            lines.append(f"next        fix the error, remove the folder (rm -r {folder}), and start the sweep again")
        elif self.why_ended or any(row.ended == "stopped" for row in self.rows):
            lines.append(f"resume      trainwright sweep {folder}")
        return lines

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict[str, object]:
        """Return the content of ``sweep.json``, which ``--json`` prints."""
        return {
            "folder": str(self.folder),
            "metric": self.metric,
            "mode": self.mode,
            "best": None if self.best is None else strict(asdict(self.best)),
            "best_recipe": None if self.best_recipe is None else str(self.best_recipe),
            "importance": dict(self.importance),
            "why_ended": self.why_ended,
            "trials": [strict(asdict(row)) for row in self.rows],
        }


def ranked(rows: Sequence[TrialRow], mode: str) -> tuple[TrialRow, ...]:
    """Return finished trials from the best to the worst, then pruned ones, the latest pruned first, then all others."""

    def key(row: TrialRow) -> tuple[int, int, float, int]:
        value = row.value if row.value is not None else 0.0
        further = -row.steps if row.ended == "pruned" else 0
        return _ORDER.index(row.ended), further, value if mode == "min" else -value, row.trial

    return tuple(sorted(rows, key=key))


def shown(value: object) -> str:
    """Return the value of a parameter as text for a table."""
    return f"{value:.4g}" if isinstance(value, float) else str(label_of(value))


def _cells(row: TrialRow) -> tuple[str, ...]:
    value = "-" if row.value is None else figure(row.value)
    findings = ", ".join(row.findings) or " ".join(row.reason.split())[:MAX_REASON_LENGTH] or "-"
    params = (shown(each) for each in row.params.values())
    return (str(row.trial), *params, value, f"{row.steps:,}", human_seconds(row.seconds), row.ended, findings)


def train_best(sweep: Sweep, rows: Sequence[TrialRow]) -> str:
    """Return the command that trains the recipe with the parameters of the best trial; "" if no trial finished.

    It names the original recipe and not ``best.yaml``, because modules are searched in the folder of a recipe.
    """
    if not rows or rows[0].ended != "finished":
        return ""
    settings = [*sweep.settings_of(rows[0].params), f"name={sweep.name}-best"]
    words = [str(sweep.recipe), *(word for each in settings for word in ("--set", each))]
    return f"trainwright train {shlex.join(words)}"


def write_results(sweep: Sweep, result: SweepResult) -> None:
    """Write the table, the best recipe and the page into the folder of the sweep."""
    text = ""
    if result.best is not None:
        settings = sweep.settings_of(result.best.params)
        settings += [f"name={sweep.name}-best", f"folder={json.dumps(str(sweep.folder.parent))}"]
        text = dump_masked(load(sweep.recipe, overrides=settings, environ={}).recipe)
        about = f"# The best of {len(result.rows)} trials: {result.metric} {figure(result.best.value or 0.0)}.\n"
        write_atomically(sweep.folder / BEST, about + text, durable=False)
    write_atomically(sweep.folder / TABLE, json.dumps(result.to_json(), indent=2) + "\n", durable=False)
    write_atomically(sweep.folder / PAGE, _page(sweep, result, text), durable=False)


def _page(sweep: Sweep, result: SweepResult, best: str) -> str:
    from trainwright.report.chart import Coordinate
    from trainwright.report.pages.sweep import SweepRow, sweep_page

    over = [row for row in result.rows if row.value is not None]
    coordinates = [
        Coordinate(
            each.path,
            [row.params[each.path] if not each.choices else shown(row.params[each.path]) for row in over],
            [shown(value) for value in each.choices],
            is_log=each.is_log,
        )
        for each in sweep.space
    ]
    rows = [SweepRow(_cells(row), row.folder if row.ended == "finished" else "") for row in result.rows]
    head = ("trial", *(each.path for each in sweep.space), result.metric, "steps", "time", "ended", "findings")
    values = [row.value for row in over if row.value is not None]
    return sweep_page(
        sweep.name,
        head,
        rows,
        coordinates=coordinates,
        values=values,
        metric=result.metric,
        is_smaller_better=result.mode == "min",
        importance=result.importance,
        best_recipe=best,
        note=result.why_ended,
    )
