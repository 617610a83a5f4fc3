"""Tags and notes of runs, and panels and columns of their pages: what a user chose for a folder of runs.

They are in ``marks.json`` beside the run folders. The runs themselves are never changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from trainwright.errors import UsageError
from trainwright.runs.folder import RunFolder, identity_of
from trainwright.runs.shapes import FileShape, read_as
from trainwright.runs.storage import write_atomically

NAME = "marks.json"

Word = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=80, pattern=r"^[^,\n]*$")]
"""A tag, or the name of a metric or of a recipe key. They are entered as lists with commas."""


Tags = Annotated[list[Word], Field(max_length=20)]
Note = Annotated[str, StringConstraints(strip_whitespace=True, max_length=2000)]
ColumnNames = Annotated[list[Word], Field(max_length=20)]


class RunMarks(FileShape):
    """The tags and the note of one run."""

    tags: Tags = Field(default_factory=list)
    note: Note = ""


class Panel(FileShape):
    """A chart of several ``metrics``; ``*`` in a name matches any text."""

    name: Word
    metrics: Annotated[list[Word], Field(max_length=40)]


Panels = Annotated[list[Panel], Field(max_length=40)]


class Marks(FileShape):
    """The content of marks.json. ``columns`` are further columns of the list of runs: metrics, recipe or plan keys.

    ``runs`` has the marks of a run under its identity, which a renamed folder keeps. The marks of a run without an
    identity are under the name of its folder.
    """

    runs: dict[str, RunMarks] = Field(default_factory=dict)
    panels: Panels = Field(default_factory=list)
    columns: ColumnNames = Field(default_factory=list)

    def of(self, run: Path) -> RunMarks:
        """Return the marks of a run folder. Older versions kept all of them under the name of the folder."""
        return self.runs.get(_key_of(run)) or self.runs.get(run.name) or RunMarks()


def _key_of(run: Path) -> str:
    return identity_of(RunFolder(run)) or run.name


def read_marks(folder: Path) -> Marks:
    """Return the marks of the runs in ``folder``. Raises UnreadableFile if the file cannot be read."""
    path = folder / NAME
    try:
        seen = path.lstat()
    except OSError:
        return Marks()
    return _read(path, (seen.st_ino, seen.st_mtime_ns, seen.st_size))


@lru_cache(maxsize=32)
def _read(path: Path, _version: tuple[int, int, int]) -> Marks:
    return read_as(path, Marks)


def marks_of(run: Path) -> RunMarks:
    """Return the marks of a run folder. Raises UnreadableFile if ``marks.json`` beside it cannot be read."""
    path = run.resolve()
    return read_marks(path.parent).of(path)


def write_marks(folder: Path, marks: Marks) -> None:
    """Replace the marks of the runs in ``folder``. Raises StorageError."""
    text = json.dumps(marks.model_dump(), indent=1, ensure_ascii=False) + "\n"
    write_atomically(folder / NAME, text, durable=False)


def mark_run(run: Path, *, tags: Sequence[str] | None = None, note: str | None = None) -> None:
    """Replace the tags of a run, its note, or both. None keeps what is there.

    Raises StorageError if ``marks.json`` cannot be read or written, and UsageError for invalid tags or an invalid note.
    """
    path = run.resolve()
    marks = read_marks(path.parent)
    before = marks_of(path)
    chosen = before.tags if tags is None else list(dict.fromkeys(tags))
    try:
        after = RunMarks(tags=chosen, note=before.note if note is None else note)
    except ValidationError:
        remedy = "at most 20 tags of 80 characters without commas, and a note of at most 2,000 characters"
        raise UsageError("these tags or this note cannot be kept", remedy=remedy) from None
    others = {key: each for key, each in marks.runs.items() if key != path.name}
    write_marks(path.parent, marks.model_copy(update={"runs": {**others, _key_of(path): after}}))
