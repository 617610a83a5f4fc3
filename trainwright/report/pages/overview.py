"""All runs of some folders as rows: the state of each, without reading its complete log."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainwright.report.pages.log import IncrementalLog
from trainwright.report.pages.view import RunView
from trainwright.runs.files import reason_of
from trainwright.runs.folder import runs_in
from trainwright.runs.printing import readable

REFRESH_S = 1.0
READ_PER_RUN_S = 0.05
"""The time for reading the log of one run before the page is shown; the rest is read at the next refreshes."""


@dataclass(frozen=True)
class Overview:
    """Views of runs by their name on a page, the newest first.

    ``unreadable`` has the reason for each run that cannot be read. ``columns`` are those that the user added.
    """

    views: Mapping[str, RunView]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ()


class RunShelf:
    """The runs in these folders; a folder may be a run itself.

    A run has the name of its folder, with the name of the parent folder before it if two are equal. A link that leads
    out of these folders is not a run.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._logs: dict[Path, IncrementalLog] = {}
        self._runs, self._refreshed_s = dict[str, Path](), -math.inf

    def runs(self) -> dict[str, Path]:
        """Return the runs by name, at most REFRESH_S old."""
        if time.monotonic() - self._refreshed_s > REFRESH_S:
            self._runs, self._refreshed_s = self._find_runs(), time.monotonic()
        return self._runs

    def _find_runs(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path in self._paths():
            name = path.name if readable(path.name) not in found else f"{path.parent.name}.{path.name}"
            name = readable(name)  # used in URLs
            if name not in found:
                found[name] = path
        return found

    def _paths(self) -> Iterable[Path]:
        for folder in self._folders:
            root = folder.resolve()
            inside = runs_in(root)
            if not inside and runs_in(root.parent) and root in runs_in(root.parent):
                yield root
            yield from (path for path in inside if path.resolve().parent == root)

    def parents(self) -> set[Path]:
        return {path.parent for path in self.runs().values()}

    def view(self, path: Path, *, for_s: float = float("inf")) -> RunView:
        """Return the current view of a run; its log is read on from the last position for about ``for_s`` seconds."""
        log = self._logs.setdefault(path, IncrementalLog(path / "log.jsonl"))
        log.advance(for_s=for_s)
        return RunView(path, log)

    def overview(self, *, for_s: float = 1.0) -> Overview:
        """Return all runs, dropping deleted ones. Long logs are read as far as ``for_s`` seconds allow."""
        runs, until_s = self.runs(), time.perf_counter() + for_s
        self._logs = {path: log for path, log in self._logs.items() if path in set(runs.values())}
        views, unreadable = dict[str, RunView](), dict[str, str]()
        for name, path in runs.items():
            try:
                views[name] = self.view(path, for_s=READ_PER_RUN_S if time.perf_counter() < until_s else 0.0)
            except Exception as error:  # an unreadable run must not hide the others
                unreadable[name] = reason_of(error)
        newest = sorted(views, key=lambda name: views[name].log.sessions[-1:] or [(0.0, 0.0)], reverse=True)
        columns = dict.fromkeys(name for view in views.values() for name in view.all_marks.columns)
        return Overview({name: views[name] for name in newest}, unreadable, tuple(columns))
