"""Reads the lines of the user's code that a run names, such as ``train.py:44``.

A log contains the name of a file without its folder, so the file is searched below a folder that the user passes. Only
Python files are read and links are not followed, so an untrusted log cannot expose other files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainwright.runs.files import UnreadableFile, read_text
from trainwright.runs.printing import printable
from trainwright.runs.secrets import masked_code

LINES_AROUND = 6
MAX_LINES = 40
MAX_LINE_CHARS = 200
MAX_ENTRIES_SEARCHED = 20_000
"""Maximum number of files and folders that are searched. Limits the time if the folder is a home folder."""
_SOURCE = re.compile(r"([\w.+ -]{1,200}\.py):(\d{1,7})")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "node_modules", "__pycache__", "checkpoints", "bundles"}


@dataclass(frozen=True)
class Excerpt:
    """Some lines of a file.

    Args:
        file: The path of the file, relative to the folder in which it was found.
        first_line: The number of the first of ``lines``.
        lines: The lines, without secrets.
        marked: The numbers of the lines that the run names.
        note: Why there are no lines, or why they may differ from those of the run.
    """

    file: str
    first_line: int = 0
    lines: tuple[str, ...] = ()
    marked: tuple[int, ...] = ()
    note: str = ""

    def shows(self, source: str) -> bool:
        """Return True if a line such as ``train.py:44`` is marked."""
        return source in {f"{Path(self.file).name}:{number}" for number in self.marked}

    def numbered(self) -> list[str]:
        """Return the lines with their numbers; ``>`` marks those that the run names."""
        numbers = range(self.first_line, self.first_line + len(self.lines))
        width = len(str(self.first_line + len(self.lines)))
        return [f"{'>' if n in self.marked else ' '} {n:{width}}  {line}" for n, line in zip(numbers, self.lines)]


def excerpt_of(sources: list[str], root: Path, *, began_s: float | None = None) -> Excerpt | None:
    """Return the lines around the ``sources`` that are in the same file as the first one.

    Args:
        sources: Lines such as ``train.py:44``, the most important first.
        root: The folder below which the file is searched.
        began_s: The Unix time at which the run began. A later change of the file is noted.

    Returns:
        The excerpt, with a note instead of lines if not exactly one file has this name or if it is too short. None if
        no source is a line of a Python file.
    """
    found = [match for each in sources if (match := _SOURCE.fullmatch(each))]
    if not found:
        return None
    name = found[0][1]
    numbers = sorted({int(each[2]) for each in found if each[1] == name})
    first = int(found[0][2])
    near = [each for each in numbers if abs(each - first) <= MAX_LINES - 2 * LINES_AROUND]
    files = list(_find_files(name, root))
    if len(files) != 1:
        where = f"{len(files)} files below {root} have this name" if files else f"no file below {root} has this name"
        return Excerpt(name, note=f"{where}: give the folder of the code with --code")
    path = files[0]
    try:
        text = read_text(path).splitlines()
    except UnreadableFile as error:
        return Excerpt(str(path.relative_to(root)), note=f"it cannot be read: {error.reason}")
    if first > len(text):
        return Excerpt(
            str(path.relative_to(root)), note=f"it has only {len(text)} lines, so it is not the file of the run"
        )
    near = [each for each in near if each <= len(text)]
    begin = max(1, min(near) - LINES_AROUND)
    lines = masked_code("\n".join(text[begin - 1 : max(near) + LINES_AROUND])).splitlines()[:MAX_LINES]
    is_newer = began_s is not None and path.stat().st_mtime > began_s
    return Excerpt(
        str(path.relative_to(root)),
        begin,
        tuple(printable(each)[:MAX_LINE_CHARS] for each in lines),
        tuple(near),
        "the file was changed after the run began, so the lines may differ" if is_newer else "",
    )


def _find_files(name: str, root: Path) -> Iterator[Path]:
    """Yield the regular files with this name below ``root``. Skips runs, hidden folders and installed packages."""
    seen = 0
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(each for each in folders if not _is_skipped(Path(folder) / each))
        seen += len(files) + len(folders)
        path = Path(folder) / name
        if name in files and path.is_file() and not path.is_symlink():
            yield path
        if seen > MAX_ENTRIES_SEARCHED:
            return


def _is_skipped(folder: Path) -> bool:
    is_run = (folder / "log.jsonl").exists()  # its files are not the user's code
    is_skipped = folder.name.startswith(".") or folder.name in _SKIPPED_FOLDERS or is_run
    return is_skipped or (folder / "pyvenv.cfg").exists()
