"""The text of an error: what went wrong, where in the user's code, and what to do."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from trainwright.errors import TrainwrightError, text_of

INTERRUPTED = 130


def describe(error: Exception | KeyboardInterrupt) -> tuple[str, int]:
    """The text of an error with its remedy, and the exit code of its kind."""
    if isinstance(error, TrainwrightError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; what was committed before is intact", INTERRUPTED
    return _unforeseen(error), 1


def _unforeseen(error: Exception) -> str:
    """An error of the user's model, loss or data: its message and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = str(Path(sys.prefix))
    files = [frame for frame in frames if not frame.filename.startswith(("<", installed))]
    ours = Path(__file__).parent.parent
    theirs = [frame for frame in files if ours not in Path(frame.filename).parents] or files
    at = f"\n  at {theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
    text = "\n  ".join([f"{text_of(error)}{at}", *getattr(error, "__notes__", [])])
    return f"{text}\n  remedy: look at that line (error.txt in the run folder has the traceback)"
