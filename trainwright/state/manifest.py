"""The manifest of a checkpoint: every file with its size and sha256, written last and committed by one rename."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from trainwright.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1


def write_manifest(folder: Path) -> int:
    """Lists all files of ``folder``, makes them and itself durable (fsync). Returns the bytes in all."""
    files = {path.name: _entry(path) for path in sorted(folder.iterdir()) if path.name != NAME}
    text = json.dumps({"format": FORMAT, "files": files}, indent=1)
    (folder / NAME).write_text(text + "\n")
    for name in (*files, NAME):
        fsync(folder / name)
    fsync(folder)
    return sum(int(entry["bytes"]) for entry in files.values())


def verify(folder: Path) -> None:
    """Raises CheckpointError, naming the file, unless every file is there with its size and hash."""
    try:
        manifest = json.loads((folder / NAME).read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / NAME} cannot be read: {error}", remedy=_REMEDY) from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: format {manifest.get('format')} of the checkpoint is not {FORMAT}, which this version reads",
            remedy="use the version of Trainwright that wrote it",
        )
    for name, expected in files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointError(f"{path} is missing", remedy=_REMEDY)
        if _entry(path) != expected:
            raise CheckpointError(f"{path} is damaged: size or sha256 differ from the manifest", remedy=_REMEDY)


_REMEDY = "resume from an older checkpoint of the run"


def fsync(path: Path) -> None:
    """Makes a file or a folder's entries durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _entry(path: Path) -> dict[str, str | int]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
