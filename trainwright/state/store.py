"""A folder of checkpoints: which are there, which is the newest that verifies, which is best, which may go."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from trainwright.errors import CheckpointError
from trainwright.state.manifest import fsync, name_of, step_of, verify

BEST = "best.json"


@dataclass(frozen=True)
class Best:
    """Which checkpoint has the best ``value`` of a validation metric so far."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class Retention:
    """What is kept: the ``newest`` ones, the best, and of each ``every`` steps the first one for ever."""

    newest: int = 2
    every: int | None = None


def checkpoints(folder: Path) -> list[Path]:
    """All committed checkpoints, newest first. One that was being replaced when a kill came counts (``.old``)."""
    found = [(step, not path.suffix, path) for path in folder.glob("step-*") if (step := step_of(path)) is not None]
    return [path for _, _, path in sorted(found, reverse=True) if path.is_dir()]


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and what is wrong with each newer one."""
    broken: list[str] = []
    for path in checkpoints(folder):
        try:
            verify(path)
        except CheckpointError as error:
            broken.append(error.message)
        else:
            return path, broken
    return None, broken


def prune(folder: Path, committed: Path, retention: Retention) -> None:
    """Deletes what need not be kept of the checkpoints up to ``committed``, which was just written.

    Later ones are damaged (a resume stepped over them) and not counted: they must not push good ones out.
    """
    all_of_them = checkpoints(folder)
    mine = all_of_them[all_of_them.index(committed) :]
    best = read_best(folder)
    spared = {path.name for path in mine[: retention.newest]} | ({name_of(best.step)} if best else set())
    if retention.every:
        spared |= _first_of_each(mine, retention.every)
    for path in mine:
        if path.name not in spared:
            shutil.rmtree(path, ignore_errors=True)


def _first_of_each(paths: Iterable[Path], every: int) -> set[str]:
    """The first checkpoint at or after each multiple. Asked after every save, it never changes its mind."""
    first: dict[int, str] = {}
    for path in paths:  # newest first: the oldest of each has the last word
        first[(step_of(path) or 0) // every] = path.name
    return {name for multiple, name in first.items() if multiple}


def write_best(folder: Path, best: Best) -> None:
    """Points to the best checkpoint, which is committed already; as a whole or not at all."""
    draft = folder / f".{BEST}.{os.getpid()}"
    draft.write_text(json.dumps(asdict(best)) + "\n")
    fsync(draft)
    draft.replace(folder / BEST)
    fsync(folder)


def read_best(folder: Path) -> Best | None:
    """What ``write_best`` wrote, if its checkpoint is there."""
    try:
        best = Best(**json.loads((folder / BEST).read_text()))
        return best if (folder / name_of(best.step)).is_dir() else None
    except (OSError, ValueError, TypeError):  # a pointer that is torn points nowhere
        return None


def sweep(folder: Path) -> None:
    """Removes what a killed save left behind."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
