"""Formats an error: what went wrong, where in the user's code, and the remedy."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from trainwright.errors import TrainwrightError, text_of

EXIT_INTERRUPTED = 130


def describe(error: Exception | KeyboardInterrupt) -> tuple[str, int]:
    """Return the text of an error with its remedy, and its exit code."""
    if isinstance(error, TrainwrightError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; what was committed before is intact", EXIT_INTERRUPTED
    return _describe_user_error(error), 1


def _describe_user_error(error: Exception) -> str:
    """Format an error of the user's model, loss or data: its message and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = str(Path(sys.prefix))
    files = [frame for frame in frames if not frame.filename.startswith(("<", installed))]
    ours = Path(__file__).parent.parent
    theirs = [frame for frame in files if ours not in Path(frame.filename).parents] or files
    at = f"\n  at {theirs[-1].filename}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
    text = "\n  ".join([f"{text_of(error)}{at}", *getattr(error, "__notes__", [])])
    return f"{text}\n  remedy: examine that line (error.txt in the run folder has the traceback)"
