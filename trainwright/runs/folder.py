"""The run folder, which holds all files of a run; two processes never create the same one."""

from __future__ import annotations

import difflib
import itertools
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import UsageError
from trainwright.runs.files import UnreadableFile, read_text
from trainwright.runs.json_values import strict
from trainwright.runs.storage import make_subfolder, storage_error, write_atomically

_RUN_FILES = ("log.jsonl", "plan.json")
"""Either file makes a folder a run folder. A ``recipe.yaml`` alone does not: it may be in the project's root."""
_STARTING_FILES = ("recipe.yaml", "lock")
"""Both exist before any other file of a run that has just begun."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run. A sub-folder is created when the first file is written to it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def bundles(self) -> Path:
        return self.path / "bundles"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    @property
    def hub(self) -> Path:
        """Configuration and tokenizer of a model of ``transformers``, in the layout of the hub."""
        return self.path / "hub"

    @classmethod
    def create(cls, root: Path | str, name: str) -> RunFolder:
        """Create ``root/name``, or ``root/name-2`` and so on if that exists.

        mkdir is atomic: two processes that start at the same time get two folders. Raises UsageError for an invalid
        name, StorageError when the folder cannot be created.
        """
        if name in ("", ".", "..") or set(name) & set('/\\\0:*?"<>|'):
            raise UsageError(
                f"{name!r} cannot name a run folder",
                remedy="use letters, digits, '-', '_' and '.' (the folder around it is given separately)",
            )
        for number in itertools.count(1):
            path = Path(root) / (name if number == 1 else f"{name}-{number}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir()
            except FileExistsError as error:
                if not path.parent.is_dir():  # the root itself is a file
                    raise storage_error(error, path.parent, "make the folder") from error
            except OSError as error:
                raise storage_error(error, path, "make the folder") from error
            else:
                return cls(path)
        raise AssertionError("unreachable: itertools.count does not end")

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Return the run folder at ``path``. Raises UsageError, with suggestions, if there is none."""
        path = Path(path)
        if _is_run(path):
            return cls(path)
        what = "holds no run" if path.is_dir() else "is not a folder" if path.exists() else "does not exist"
        meant = _similar_runs(path)
        there = ", ".join(map(str, _newest(path.parent)))
        remedy = f"give a run folder, such as {there}" if there else "give a run folder: runs/<name>"
        if meant:
            remedy = f"did you mean {' or '.join(str(run if run.name else run.resolve()) for run in meant)}?"
        raise UsageError(f"{path} {what}", remedy=remedy)

    def write_text(self, name: str, text: str) -> Path:
        """Write ``name`` (relative to the folder) atomically; the file survives a power failure.

        Raises StorageError when the disk is full or the folder may not be written.
        """
        path = self.path / name
        try:
            if path.parent == self.path:
                self.path.mkdir(exist_ok=True)
            else:
                make_subfolder(path.parent)
        except OSError as error:
            raise storage_error(error, path, "write") from error
        write_atomically(path, text)
        return path

    def write_json(self, name: str, value: object) -> Path:
        """Write ``value`` (plain values and dataclasses) as indented strict JSON, as ``write_text`` does."""
        return self.write_text(name, json.dumps(strict(value), indent=2, allow_nan=False) + "\n")


def _is_run(path: Path) -> bool:
    try:
        return any((path / sign).is_file() for sign in _RUN_FILES) or all(
            (path / sign).is_file() for sign in _STARTING_FILES
        )
    except OSError:  # the folder may not be searched; opening the run reports the error
        return path.is_dir()


def runs_in(root: Path) -> list[Path]:
    """Return the run folders in ``root``, by name; none if it cannot be read."""
    try:
        return sorted(child for child in root.iterdir() if _is_run(child))
    except OSError:  # does not exist, not a folder, or not readable
        return []


def _written_ns(run: Path) -> int:
    return max((run / sign).stat().st_mtime_ns for sign in (*_RUN_FILES, *_STARTING_FILES) if (run / sign).exists())


def _similar_runs(path: Path) -> list[Path]:
    """Return runs that ``path`` may have meant: one in ``runs`` or around it, those in it, or with a similar name."""
    around = [run for run in (path.parent / "runs" / path.name, *path.parents) if _is_run(run)][:1]
    inside = _newest(path)
    siblings = {run.name: run for run in runs_in(path.parent)}
    similar = [siblings[name] for name in difflib.get_close_matches(path.name, siblings, n=3)]
    return around or inside or similar


def _newest(root: Path) -> list[Path]:
    """Return the three runs in a folder that were written last."""
    return sorted(runs_in(root), key=_written_ns, reverse=True)[:3]


NAME = "run-id"


def identity_of(folder: RunFolder) -> str:
    """Return the identity of a run, 16 hexadecimal digits; "" if it has none, or its file cannot be read."""
    try:
        text = read_text(folder.path / NAME).strip()
    except UnreadableFile:
        return ""
    return text if re.fullmatch("[0-9a-f]{16}", text) else ""


def ensure_identity(folder: RunFolder) -> str:
    """Return the identity of a run, creating it if it has none. Raises StorageError."""
    identity = identity_of(folder) or secrets.token_hex(8)
    write_identity(folder, identity)
    return identity


def write_identity(folder: RunFolder, identity: str) -> None:
    """Write the identity of a run unless its folder has it. Raises StorageError."""
    if identity_of(folder) != identity:
        folder.write_text(NAME, f"{identity}\n")
