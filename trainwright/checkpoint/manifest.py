"""The manifest of a checkpoint: every file with its size and sha256, written last and committed by one rename."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError

from trainwright.checkpoint.codec import StateDict, Tree
from trainwright.errors import CheckpointError, text_of
from trainwright.runs.files import STATE, UnreadableFile, open_file, read_json
from trainwright.runs.system_calls import fsync

NAME = "manifest.json"
FROZEN = "frozen.safetensors"
"""The weights that are not trained, if they are most of the model."""
FORMAT = 2
SHARDED_FORMAT = 3
"""Format of a checkpoint that several ranks wrote, with a file of each rank."""
FROZEN_FORMAT = 4
"""Format of a checkpoint with frozen.safetensors, which earlier versions cannot read."""
NEEDED = {
    FORMAT: ("model.safetensors", "rest.safetensors", "state.json"),
    SHARDED_FORMAT: ("shards.json", "state.json"),
    FROZEN_FORMAT: (FROZEN, "model.safetensors", "rest.safetensors", "state.json"),
}
"""The files that the manifest of each format must list."""


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder; None for other names."""
    found = re.fullmatch(r"step-([0-9]{8,18})(\.old)?", path.name)  # other programs write names such as step-100
    return int(found[1]) if found else None


FileEntry: TypeAlias = dict[str, int | str]
"""The size and the sha256 of a file."""


def write_manifest(
    folder: Path,
    step: int,
    best: Mapping[str, Tree] | None = None,
    run: str = "",
    durable: Mapping[str, FileEntry] | None = None,
    frozen: str | None = None,
) -> int:
    """List all files of ``folder`` and make them and the manifest durable (fsync). Return the total number of bytes.

    ``best`` holds the metric and value by which the state is the best so far; ``run`` is the identity of the run.
    ``durable`` are files that other ranks wrote and have made durable, so they are not read here. ``frozen`` is the
    hash of the weights in frozen.safetensors.
    """
    written = durable or {}
    own = {path.name: file_entry(path) for path in sorted(folder.iterdir()) if path.name not in (NAME, *written)}
    files = {**own, **written}
    body = {
        "format": SHARDED_FORMAT if durable is not None else FORMAT if frozen is None else FROZEN_FORMAT,
        "step": step,
        "run": run,
        "best": best,
        "files": files,
        **({} if frozen is None else {"frozen": frozen}),
    }
    text = json.dumps({**body, "sha256": _sum(body)}, indent=1)
    (folder / NAME).write_text(text, "utf-8")  # no newline at its end, so that any truncation is detected
    for name in (*own, NAME):
        fsync(folder / name)
    fsync(folder)
    return sum(int(entry["bytes"]) for entry in files.values())


class NotReadableHere(CheckpointError):
    """A checkpoint of another format, or one that this user cannot read. It may be intact.

    A run does not resume from an older one instead, because later training would be lost.
    """


def read_manifest(folder: Path) -> StateDict:
    """Read the manifest. Raises CheckpointError if it is unreadable, damaged or of another format."""
    try:
        manifest: StateDict = read_json(folder / NAME, follow_links=True)
        if not isinstance(manifest["files"], dict) or not isinstance(manifest["step"], int):
            raise TypeError("files is not a mapping, or step is not a number")
    except UnreadableFile as error:
        raise _unreadable(folder / NAME, error) from None
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / NAME} cannot be read: {error}", remedy=_REMEDY) from None
    if manifest.pop("sha256", None) != _sum(manifest):
        raise CheckpointError(f"{folder / NAME} is damaged: it differs from its own sha256", remedy=_REMEDY)
    if manifest.get("format") not in NEEDED:
        raise NotReadableHere(
            f"{folder / NAME}: format {manifest.get('format')} is none of {[*NEEDED]}, which this version reads",
            remedy="use the version of Trainwright that wrote it (`version` in log.jsonl)",
        )
    return manifest


def run_of(folder: Path) -> str | None:
    """Return the identity of the run that wrote a checkpoint; None if its manifest lacks it or cannot be read."""
    try:
        run = read_manifest(folder).get("run")
    except CheckpointError:
        return None
    return run if isinstance(run, str) else None


def read_state(checkpoint: Path) -> StateDict:
    """Read state.json. Raises CheckpointError if it cannot be read."""
    try:
        state: StateDict = read_json(checkpoint / "state.json", STATE, follow_links=True)
    except UnreadableFile as error:
        raise invalid_content(checkpoint, f"state.json: {error.reason}") from None
    if not isinstance(state, dict):
        raise invalid_content(checkpoint, "state.json is no mapping")
    if "papers" in state and "metadata" not in state:  # the name that earlier versions wrote
        state["metadata"] = state.pop("papers")
    return state


def _unreadable(path: Path, error: UnreadableFile) -> CheckpointError:
    if isinstance(error.__cause__, PermissionError):
        return not_permitted(path, error.__cause__)
    return CheckpointError(error.message, remedy=_REMEDY)


def not_permitted(path: Path, error: PermissionError) -> NotReadableHere:
    """Return the error for a file or folder that this user may not read."""
    return NotReadableHere(
        f"{path} cannot be read: {error.strerror}",
        remedy=f"let this user read it (chmod -R u+rwX {shlex.quote(str(path.parent))}), or become its owner",
    )


def _sum(body: Mapping[str, Tree]) -> str:
    """Return the hash of the manifest itself, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, needed: Sequence[str] | None = None) -> None:
    """Raise CheckpointError, naming the file, unless every file is present with its size and hash.

    ``needed`` are files that the manifest must list; by default the files of the checkpoint's format.
    """
    manifest = read_manifest(folder)
    all_needed = NEEDED[manifest["format"]] if needed is None else needed
    for name, expected in {**dict.fromkeys(all_needed), **manifest["files"]}.items():
        path = folder / name
        if Path(name).name != name or not os.path.lexists(path):
            raise CheckpointError(f"{path} is missing", remedy=_REMEDY)
        try:
            if not _matches(path, expected):
                raise CheckpointError(f"{path} is damaged: size or sha256 differ from the manifest", remedy=_REMEDY)
        except UnreadableFile as error:
            raise _unreadable(path, error) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}", remedy=_REMEDY) from None
    if step_of(folder) not in (None, manifest["step"]):
        raise CheckpointError(f"{folder} holds step {manifest['step']}: a folder was renamed", remedy=_REMEDY)


@contextmanager
def raising_checkpoint_error(path: Path) -> Iterator[None]:
    """Raise CheckpointError if a verified checkpoint cannot be read, because its content is invalid."""
    try:
        yield
    except INVALID_CONTENT_ERRORS as error:
        raise invalid_content(path, text_of(error, lines=1)) from None


def invalid_content(path: Path, reason: str) -> CheckpointError:
    """Return the error for a verified checkpoint with content that no run writes."""
    return CheckpointError(
        f"{path} is no checkpoint of Trainwright, though its manifest fits it ({reason[:300]})",
        remedy="delete it, and resume from an older one",
    )


INVALID_CONTENT_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
)
"""Errors that reading and loading invalid content raises."""
_REMEDY = "resume from an older checkpoint of the run"


def file_entry(path: Path) -> FileEntry:
    """Return the size and the sha256 of a file. Raises OSError."""
    with open_file(path, follow_links=True) as file:
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _matches(path: Path, expected: Tree) -> bool:
    """Return True if a file matches its entry. The size is compared first, because a replaced file may be endless."""
    with open_file(path, follow_links=True) as file:
        size = os.fstat(file.fileno()).st_size
    return isinstance(expected, dict) and size == expected.get("bytes") and file_entry(path) == expected
