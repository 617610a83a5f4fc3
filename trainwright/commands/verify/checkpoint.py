"""``verify checkpoint``: examines every file, hash, tensor and value of checkpoints."""

from __future__ import annotations

from pathlib import Path

from trainwright.checkpoint.examination import CheckpointReport, examine
from trainwright.checkpoint.manifest import NAME, step_of
from trainwright.checkpoint.store import checkpoints
from trainwright.errors import UsageError


def verify_checkpoint(path: Path) -> list[CheckpointReport]:
    """Examine a checkpoint, or all in a ``checkpoints`` folder or a run folder, the newest first.

    Raises UsageError for any other path.
    """
    if path.is_dir() and ((path / NAME).is_file() or step_of(path) is not None):
        return [examine(path)]
    for folder in (path / "checkpoints", path):
        if folder.is_dir() and (found := checkpoints(folder)):
            return [examine(each) for each in found]
    why = "is not a folder" if path.exists() else "does not exist"
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir())
        why = f"contains no checkpoint; it has {', '.join(names[:8]) or 'no files'}{' ...' if names[8:] else ''}"
    remedy = "give a checkpoint (runs/<name>/checkpoints/step-XXXXXXXX) or a run folder"
    raise UsageError(f"{path} {why}", remedy=remedy)
