"""All runs of some folders as rows: what each is doing, without reading its log as a whole."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainwright.report.pages.log import LogSoFar
from trainwright.report.pages.view import RunView
from trainwright.runs.files import reason_of
from trainwright.runs.folder import runs_in
from trainwright.runs.printing import readable

LOOK_S = 1.0
FEW_S = 0.05
"""What may be spent on the log of one run before the page is shown; the rest is read at the next looks."""


@dataclass(frozen=True)
class Overview:
    """Views of runs by the name that a page calls them, the newest first.

    ``unreadable`` has the reason for each run that cannot be read.
    """

    views: Mapping[str, RunView]
    unreadable: Mapping[str, str] = field(default_factory=dict)


class RunShelf:
    """The runs in these folders; a folder may be a run itself.

    Names are those of the run folders, with that of the folder around where two are equal. A link that leads out of
    its folder is no run of it.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._logs: dict[Path, LogSoFar] = {}
        self._runs, self._looked_s = dict[str, Path](), -math.inf

    def runs(self) -> dict[str, Path]:
        """The runs by name, as they were LOOK_S ago at most."""
        if time.monotonic() - self._looked_s > LOOK_S:
            self._runs, self._looked_s = self._found(), time.monotonic()
        return self._runs

    def _found(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path in self._paths():
            name = path.name if readable(path.name) not in found else f"{path.parent.name}.{path.name}"
            name = readable(name)  # it goes into addresses
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

    def view(self, path: Path, *, for_s: float = float("inf")) -> RunView:
        """A run as it is now; its log is read on from where it was, for about ``for_s`` seconds."""
        log = self._logs.setdefault(path, LogSoFar(path / "log.jsonl"))
        log.advance(for_s=for_s)
        return RunView(path, log)

    def overview(self, *, for_s: float = 1.0) -> Overview:
        """All of them; forgets those that are gone. Of long logs as much is read as ``for_s`` seconds allow."""
        runs, until_s = self.runs(), time.perf_counter() + for_s
        self._logs = {path: log for path, log in self._logs.items() if path in set(runs.values())}
        views, unreadable = dict[str, RunView](), dict[str, str]()
        for name, path in runs.items():
            try:
                views[name] = self.view(path, for_s=FEW_S if time.perf_counter() < until_s else 0.0)
            except Exception as error:  # whatever its files hold, the list of the others is shown
                unreadable[name] = reason_of(error)
        newest = sorted(views, key=lambda name: views[name].log.sessions[-1:] or [(0.0, 0.0)], reverse=True)
        return Overview({name: views[name] for name in newest}, unreadable)
