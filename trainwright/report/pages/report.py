"""Writes ``report.html``: one run, or several side by side, as one self-contained file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import StorageError
from trainwright.report.pages.view import RunView
from trainwright.runs.folder import RunFolder
from trainwright.runs.json_values import JsonValue
from trainwright.runs.storage import write_atomically

NAME = "report.html"


@dataclass(frozen=True)
class WrittenReport:
    """The path and size of a written report."""

    path: Path
    runs: tuple[str, ...]
    bytes: int
    exit_code = 0

    def lines(self) -> list[str]:
        return [f"{self.path}  ({self.bytes:,} bytes)"]

    def to_json(self) -> Mapping[str, JsonValue]:
        return {"path": str(self.path), "runs": list(self.runs), "bytes": self.bytes}


def write_report(runs: Sequence[Path], out: Path | None = None) -> WrittenReport:
    """Write the report of these runs to ``out``, by default in the folder of the run, for several in the current one.

    Raises UsageError for a path that is not a run, and StorageError.
    """
    from trainwright.report.pages.render import runs_page  # imports jinja2, which a run needs only at its end

    views = [RunView.read(path) for path in runs]
    text = runs_page(views)
    path = out or (views[0].folder.path / NAME if len(views) == 1 else Path(NAME))
    write_atomically(path, text, durable=False)  # it can be made again at any time
    return WrittenReport(path, tuple(view.name for view in views), len(text.encode()))


def leave_report(folder: RunFolder, warn: Callable[[str], None]) -> None:
    """Write the report of a finished run. An error is only a warning, because it must not fail the run."""
    try:
        if folder.log.is_file():
            write_report([folder.path])
    except StorageError as error:
        warn(f"no {NAME}: {error.message} ({error.remedy})")
    except Exception as error:
        warn(f"no {NAME}: {type(error).__name__}: {error} (try `trainwright report {folder.path}`)")
