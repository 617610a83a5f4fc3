"""Writes ``metrics.csv`` in the run folder, with the columns step, name and value."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainwright.monitoring.sinks import BaseSink
from trainwright.runs.files import lines_of, open_file
from trainwright.runs.storage import draft_of

NAME = "metrics.csv"
HEAD = ("step", "name", "value")


class CsvFile(BaseSink):
    """A Sink. Rows of an earlier process after ``from_step`` are removed, because a resume repeats those steps."""

    def open(self) -> None:
        path = self._folder / NAME
        earlier = _rows_until(path, self._from_step)
        draft = draft_of(path)
        draft.unlink(missing_ok=True)
        with draft.open("x", encoding="utf-8", newline="") as file:  # follows no link
            csv.writer(file, lineterminator="\n").writerows([HEAD, *earlier])
        draft.replace(path)
        self._file = path.open("a", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.writer(self._file, lineterminator="\n")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.writerows((step, name, value) for name, value in values.items())

    def close(self, _exit_code: int) -> None:
        self._file.close()


def _rows_until(path: Path, step: int) -> list[list[str]]:
    """Return the complete rows of an earlier process. A kill may have torn the last one."""
    if not step or not path.is_file():
        return []
    with open_file(path) as file:
        rows = csv.reader(line.decode("utf-8", errors="replace") for line in lines_of(file))
        return [row for row in rows if len(row) == len(HEAD) and _step_of(row) <= step and row[2]]


def _step_of(row: Sequence[str]) -> float:
    """Return the step; infinite for a row without one, such as the head."""
    return int(row[0]) if re.fullmatch("[0-9]{1,18}", row[0]) else math.inf
