"""The identity of a run: a random number in its folder, which each of its checkpoints carries.

Two runs may store their checkpoints in one folder, by links to a larger disk. Each deletes and replaces only its own.
"""

from __future__ import annotations

import re
import secrets

from trainwright.runs.files import UnreadableFile, read_text
from trainwright.runs.folder import RunFolder

NAME = "run-id"


def identity_of(folder: RunFolder) -> str:
    """Return the identity of a run; "" if it has none, or its file cannot be read."""
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
