"""The identity of a run: a random number in its folder, which each of its checkpoints carries.

Two runs may keep their checkpoints in one folder, by links to a larger disk. Each deletes and replaces its own only.
"""

from __future__ import annotations

import re
import secrets

from trainwright.runs.files import UnreadableFile, read_text
from trainwright.runs.folder import RunFolder

NAME = "run-id"


def identity_of(folder: RunFolder) -> str:
    """Returns the identity of a run; "" for one that has none, or whose file cannot be read."""
    try:
        text = read_text(folder.path / NAME).strip()
    except UnreadableFile:
        return ""
    return text if re.fullmatch("[0-9a-f]{16}", text) else ""


def ensure_identity(folder: RunFolder) -> str:
    """Returns the identity of a run, and gives it one where it has none. Raises StorageError."""
    identity = identity_of(folder) or secrets.token_hex(8)
    keep_identity(folder, identity)
    return identity


def keep_identity(folder: RunFolder, identity: str) -> None:
    """Writes the identity of a run unless its folder has it. Raises StorageError."""
    if identity_of(folder) != identity:
        folder.write_text(NAME, f"{identity}\n")
