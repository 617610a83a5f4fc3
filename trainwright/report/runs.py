"""The runs of a folder as a table (``trainwright runs``): start, state, verdict and losses of each."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from trainwright.report.marks import marks_of
from trainwright.report.verdict import evaluations_in, verdict_of
from trainwright.runs.files import reason_of
from trainwright.runs.folder import RunFolder, runs_in
from trainwright.runs.json_values import strict
from trainwright.runs.media import media_in
from trainwright.runs.printing import figure, in_columns
from trainwright.runs.reader import read_begin_s, read_end, state_of
from trainwright.runs.records import Ended, RunVerdict, Step, Watched


@dataclass(frozen=True)
class RunRow:
    """One run. ``began_s`` is Unix time in seconds. ``loss`` and ``val_loss`` are the newest."""

    run: Path
    began_s: float
    state: str
    verdict: RunVerdict
    step: int
    loss: float | None
    val_loss: float | None
    tags: tuple[str, ...] = ()
    note: str = ""
    media: tuple[str, ...] = ()
    """The folders of the images, texts and histograms that the user logged."""


@dataclass(frozen=True)
class RunTable:
    """The runs of ``folder``, the oldest first."""

    folder: Path
    rows: tuple[RunRow, ...]
    exit_code = 0

    def lines(self) -> list[str]:
        if not self.rows:
            return [f"{self.folder} holds no run"]
        head = ("folder", "began (UTC)", "state", "verdict", "step", "loss", "val loss", "tags")
        cells = [head, *(_cells(row) for row in self.rows)]
        return in_columns(cells if any(row.tags for row in self.rows) else [each[:-1] for each in cells])

    def to_json(self) -> dict[str, object]:
        return {"folder": str(self.folder), "runs": [strict({**asdict(row), "run": str(row.run)}) for row in self.rows]}


def list_runs(folder: Path, tagged: Sequence[str] = ()) -> RunTable:
    """Return a row for each run in ``folder``, which may be a run itself, that has all the tags ``tagged``.

    A run without a log is listed, too. If a run cannot be read, its state is the reason.
    """
    paths = runs_in(folder) or [path for path in runs_in(folder.parent) if path == folder]
    rows = []
    for path in paths:
        marks = marks_of(path)
        if set(tagged) <= set(marks.tags):
            rows.append(replace(_row_or_reason(RunFolder(path)), tags=tuple(marks.tags), note=marks.note))
    return RunTable(folder, tuple(sorted(rows, key=lambda row: row.began_s)))


def _row_or_reason(folder: RunFolder) -> RunRow:
    try:
        return _row(folder)
    except Exception as error:
        state = f"cannot be read: {reason_of(error)}"
        return RunRow(folder.path, 0.0, state, RunVerdict(word="-", sentence=state), 0, None, None)


def _row(folder: RunFolder) -> RunRow:
    records = read_end(folder.log) if os.path.lexists(folder.log) else ()
    began_s = read_begin_s(folder.log) if os.path.lexists(folder.log) else None
    if began_s is None:
        began_s = min(sign.stat().st_mtime for sign in (folder.recipe, folder.plan, folder.log) if sign.exists())
    steps = [record for record in records if isinstance(record, Step | Watched)]
    evaluated = evaluations_in(records)
    return RunRow(
        folder.path,
        began_s,
        state_of(folder.path, records),
        verdict_of(folder),
        max((record.step for record in records if isinstance(record, Step | Watched | Ended)), default=0),
        steps[-1].loss if steps else None,
        evaluated[-1].loss if evaluated else None,
        media=media_in(folder.path),
    )


def _cells(row: RunRow) -> tuple[str, ...]:
    try:
        began = datetime.fromtimestamp(row.began_s, UTC).strftime("%Y-%m-%d %H:%M") if row.began_s else "-"
    except (ValueError, OverflowError, OSError):  # a file from the year 10,000
        began = "-"
    losses = (_number(row.loss), _number(row.val_loss))
    return (str(row.run), began, row.state, row.verdict.word, f"{row.step:,}", *losses, ", ".join(row.tags))


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else figure(value)
