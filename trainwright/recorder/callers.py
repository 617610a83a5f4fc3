"""Where in the user's source a call was made: the first frame outside of torch and of this package."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeAlias

import torch

_ROOMS = ("recorder", "replay", "watching", "adapters", "doctor")
_OURS = tuple(f"{Path(__file__).parents[1]}/{room}/" for room in _ROOMS)
"""What stands between a loop and its recorder. The loop may be one of ours, of ``demo --break``."""
_PACKAGES = (f"{Path(torch.__file__).parent}/", *_OURS)
_STANDARD = f"{Path(contextlib.__file__).parent}/"
_LIBRARIES = ("lightning", "pytorch_lightning", "transformers", "accelerate")
"""Training libraries whose loop is not the user's either."""

Line: TypeAlias = int | None
"""Of a file; None where there is none."""
FrameLine: TypeAlias = tuple[int, CodeType, int]
"""A frame of a stack by its id, which one that comes later may have again; its function; its line."""


def caller() -> str | None:
    """``train.py:44``; None where no frame of the stack is the user's. About 2 us a call."""
    return line_of(calling_frame())


def line_of(frame: FrameType | None) -> str | None:
    """``train.py:44``, where a frame is; None for none."""
    return None if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def calling_frame() -> FrameType | None:
    """The innermost frame of this stack that is the user's; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            return frame
        frame = frame.f_back
    return None


def is_users(frame: FrameType) -> bool:
    """Whether a frame is neither of torch, of a training library, of Python's own library nor of this package."""
    name = frame.f_code.co_filename
    root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return not name.startswith((*_PACKAGES, "<")) and root not in _LIBRARIES and not _is_standard(name)


def line_within(code: CodeType | None) -> Line:
    """The line at which the function ``code`` stands on this stack; None where it does not."""
    frame: FrameType | None = sys._getframe(1) if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_lineno


def lines_of_stack() -> list[FrameLine]:
    """All frames of this stack, outermost first."""
    frame: FrameType | None = sys._getframe(1)
    lines: list[FrameLine] = []
    while frame is not None:
        lines.append((id(frame), frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return lines[::-1]


def _is_standard(name: str) -> bool:
    """Whether a file is of Python's standard library: contextlib and functools stand between a call and its caller."""
    return name.startswith(_STANDARD) and "site-packages" not in name
