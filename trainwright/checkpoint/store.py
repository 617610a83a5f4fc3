"""A folder of checkpoints: lists them, finds the newest intact one and the best one, and deletes old ones.

The folder may be a link to a folder that also has files of another program, or checkpoints of another run. In all
functions ``run`` is the identity of the run. Checkpoints of other runs are not listed, unless ``run`` is empty. A
checkpoint is deleted or replaced only if its manifest has this identity. A run without an identity has ``run=""``, also
in its manifests.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from trainwright.checkpoint.manifest import (
    NAME,
    NotReadableHere,
    name_of,
    not_permitted,
    read_manifest,
    run_of,
    step_of,
    verify,
)
from trainwright.errors import CheckpointError
from trainwright.runs.files import UnreadableFile, read_json
from trainwright.runs.storage import remove
from trainwright.runs.system_calls import fsync

BEST_FILE = "best.json"


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best ``value`` of a validation metric so far.

    ``batches`` is the number of validation batches; 0: all of them, None: unknown (written by an earlier version).
    """

    step: int
    metric: str
    value: float
    batches: int | None = 0


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep: the ``newest`` ones, the best, and the first one of each ``every`` steps."""

    newest: int = 2
    every: int | None = None


def checkpoints(folder: Path, run: str = "") -> list[Path]:
    """Return all committed checkpoints, newest first, including those that a killed save was replacing (``.old``)."""
    found = [(step, not path.suffix, path) for path in folder.glob("step-*") if (step := step_of(path)) is not None]
    return [path for _, _, path in sorted(found, reverse=True) if path.is_dir() and not _is_of_another(path, run)]


def is_own(path: Path, run: str) -> bool:
    """Return True if the run may delete or replace this checkpoint."""
    return not path.is_symlink() and run_of(path) == run


def _is_of_another(path: Path, run: str) -> bool:
    return bool(run) and (run_of(path) or run) != run


def newest_valid(
    folder: Path, require: Callable[[Path], object] = verify, run: str = ""
) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that ``require`` accepts, and the reason for which each newer one is rejected.

    Raises:
        CheckpointError: A newer one may be intact but cannot be read here, so later training would be lost.
    """
    broken: list[str] = []
    _require_readable(folder)
    there = checkpoints(folder)
    own = [path for path in there if not _is_of_another(path, run)]
    for path in own:
        try:
            require(path)
        except NotReadableHere:
            raise
        except CheckpointError as error:
            broken.append(error.message)
        else:
            return path, broken
    if there and not own:
        broken.append(
            f"{there[0]} belongs to the run {run_of(there[0])}, and this is the run {run}: if they are the same run, "
            f"write {run_of(there[0])} into {folder.parent / 'run-id'}"
        )
    return None, broken


def _require_readable(folder: Path) -> None:
    """Raise CheckpointError for an unreadable folder, which would otherwise appear empty."""
    try:
        any(path.is_dir() for path in folder.iterdir())
    except PermissionError as error:
        raise not_permitted(folder, error) from None
    except OSError:
        return  # it does not exist


def set_aside_newer(folder: Path, resumed: Path, run: str = "") -> list[Path]:
    """Rename the checkpoints that are newer than ``resumed``, none of which verifies. Returns their new paths.

    Otherwise ``prune`` would later count them among the newest, and delete intact checkpoints. A folder without a
    manifest is not renamed, because another program may have written it. The pointer to the best checkpoint is removed
    if the best checkpoint is newer than ``resumed``.
    """
    found, best = checkpoints(folder, run), pointed_to(folder)
    if best and best.step > (step_of(resumed) or 0):
        with suppress(OSError):
            (folder / BEST_FILE).unlink()
    return [set_aside(path) for path in found[: found.index(resumed)] if os.path.lexists(path / NAME)]


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that it is no longer used or deleted. Returns its new path, or ``path`` on failure."""
    names = (f"damaged-{path.name}{f'-{number}' if number > 1 else ''}" for number in count(1))
    with suppress(OSError):
        return path.rename(next(aside for name in names if not (aside := path.with_name(name)).exists()))
    return path


def prune(folder: Path, committed: Path, retention: Retention, run: str = "") -> None:
    """Delete the checkpoints up to ``committed``, which was just written, that ``retention`` does not keep.

    Checkpoints of later steps belong to training that a resume has discarded. They are not counted, because they would
    displace good checkpoints.
    """
    earlier = (path for path in checkpoints(folder) if (step_of(path) or 0) <= (step_of(committed) or 0))
    mine = [path for path in earlier if is_own(path, run)]
    kept = retained([path.name for path in mine], retention, read_best(folder, run))
    for path in mine:
        if path.name not in kept:
            delete(path, run)


def make_room(folder: Path, step: int, retention: Retention, run: str = "") -> bool:
    """Delete the oldest checkpoint that ``prune`` would delete after a save of ``step``, but never the newest.

    Return True if one was deleted.
    """
    mine = [path for path in checkpoints(folder) if is_own(path, run) and (step_of(path) or 0) < step]
    kept = retained([name_of(step), *(path.name for path in mine)], retention, read_best(folder, run))
    surplus = [path for path in mine[1:] if path.name not in kept]
    for path in surplus[-1:]:
        delete(path, run)
    return bool(surplus)


def retained(names: Sequence[str], retention: Retention, best: Best | None) -> set[str]:
    """Return the names of the checkpoints to keep. ``names`` is newest first."""
    kept = {*names[: retention.newest]} | ({name_of(best.step)} if best else set())
    if retention.every:
        kept |= _first_of_each(names, retention.every)
    return kept


def delete(path: Path, run: str) -> None:
    """Delete a checkpoint.

    It is renamed first, so that a kill leaves no incomplete checkpoint; ``sweep`` removes the rest.
    """
    doomed = path.with_name(f".{path.name}{_mark(run)}.deleted")
    with suppress(OSError):
        path.rename(doomed)
        path = doomed
    shutil.rmtree(path, ignore_errors=True)


def _first_of_each(names: Iterable[str], every: int) -> set[str]:
    """Return the first checkpoint at or after each multiple of ``every``. Later saves do not change the selection."""
    first: dict[int, str] = {}
    for name in names:  # newest first, so the oldest name of each multiple remains
        first[(step_of(Path(name)) or 0) // every] = name
    return {name for multiple, name in first.items() if multiple}


def write_best(folder: Path, best: Best, run: str = "") -> None:
    """Write the pointer to the best checkpoint, which is committed already. The write is atomic."""
    draft = folder / f".{BEST_FILE}{_mark(run)}.tmp"
    draft.unlink(missing_ok=True)
    with draft.open("x", encoding="utf-8") as file:  # "x" does not follow links
        file.write(json.dumps(asdict(best)) + "\n")
    fsync(draft)
    draft.replace(folder / BEST_FILE)
    fsync(folder)


def read_best(folder: Path, run: str = "") -> Best | None:
    """Return the best checkpoint: the one in the pointer, or a later one whose manifest marks it as best.

    So a kill between the commit of a checkpoint and the write of the pointer loses nothing.
    """
    with suppress(OSError):
        pointer, there = pointed_to(folder), checkpoints(folder, run)
        later = (path for path in there if pointer is None or (step_of(path) or 0) > pointer.step)
        found = next((best for path in later if (best := _own_best(path))), pointer)
        return found if found and folder / name_of(found.step) in there else None
    return None


def repair_best(folder: Path, run: str = "") -> Best | None:
    """Return ``read_best``, and write the pointer if a kill prevented that."""
    best = read_best(folder, run)
    with suppress(OSError):
        if best and pointed_to(folder) != best:
            write_best(folder, best, run)
    return best


def _own_best(path: Path) -> Best | None:
    """Return the ``Best`` in the manifest of a checkpoint; None if it was not the best when it was saved."""
    with suppress(CheckpointError):
        return _as_best(read_manifest(path).get("best"))
    return None


def pointed_to(folder: Path) -> Best | None:
    """Return the content of the pointer to the best checkpoint; None without a valid one."""
    with suppress(UnreadableFile):
        return _as_best(read_json(folder / BEST_FILE))
    return None


def _as_best(read: object) -> Best | None:
    """Return a Best from parsed JSON; None for anything that ``write_best`` does not write."""
    with suppress(KeyError, OverflowError):
        if not isinstance(read, dict):
            return None
        step = read["step"]
        metric = read["metric"]
        value = read["value"]
        if type(step) is int and type(metric) is str and type(value) in (int, float) and math.isfinite(value):
            batches = read.get("batches")
            return Best(step, metric, float(value), batches if type(batches) is int else None)
    return None


def draft_of_step(folder: Path, step: int, run: str) -> Path:
    """Return the path at which the run writes a checkpoint before it is committed."""
    return folder / f".{name_of(step)}{_mark(run)}.tmp"


def sweep(folder: Path, run: str = "") -> None:
    """Remove the unfinished files of a killed save of this run, identified by their names."""
    ours = re.compile(rf"\.(step-\d{{8,}}(\.old)?|{re.escape(BEST_FILE)}){re.escape(_mark(run))}\.(tmp|deleted)")
    for path in folder.glob(".*"):
        if ours.fullmatch(path.name):
            remove(path)


def _mark(run: str) -> str:
    return f".{run}" if run else ""
