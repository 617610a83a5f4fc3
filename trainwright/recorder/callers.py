"""Finds the user's source line of a call: the innermost frame outside torch, ``_LIBRARIES`` and this package."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeAlias

import torch

_ROOMS = ("recorder", "replay", "watching", "adapters", "doctor")
_OURS = tuple(f"{Path(__file__).parents[1]}/{room}/" for room in _ROOMS)
"""Folders whose code runs between a loop and its recorder. Loops of this package itself are in other folders."""
_PACKAGES = (f"{Path(torch.__file__).parent}/", *_OURS)
_NOT_PLACES = (f"{Path(__file__).parents[1]}/", f"{Path(sys.executable).parent}/")
"""This package and the folder of command line programs such as ``trainwright``. No fault is located in them."""
_PLANTED = f"{Path(__file__).parents[1]}/commands/demo_faults.py"  # the loops of ``trainwright demo --break``
_STANDARD = f"{Path(contextlib.__file__).parent}/"
_LIBRARIES = ("lightning", "pytorch_lightning", "transformers", "accelerate", "typer", "click")
"""Training and command line libraries. Their code is not the user's either."""

Line: TypeAlias = int | None
"""A line number; None if there is none."""


def caller() -> str | None:
    """Returns the user's line, such as ``train.py:44``; None without one. About 2 us a call.

    In a run of ``tw.fit`` it may be the call of ``fit``.
    """
    return line_of(next(_places(), None))


def calling_frames() -> list[FrameType]:
    """Returns the user's frames of this stack, innermost first."""
    return list(_places())


def _places() -> Iterator[FrameType]:
    return (each for each in frames() if is_users(each) and _is_place(each.f_code.co_filename))


def _is_place(name: str) -> bool:
    is_ours = name.startswith(_NOT_PLACES) or name.endswith("/trainwright")  # pipx links the program to other folders
    return not is_ours or name == _PLANTED


def line_of(frame: FrameType | None) -> str | None:
    """Returns the line of a frame, such as ``train.py:44``; None for None."""
    return None if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def calling_frame() -> FrameType | None:
    """Returns the innermost user frame of this stack; None without one."""
    return next(filter(is_users, frames()), None)


def frames() -> Iterator[FrameType]:
    """Yields the frames of this stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_recorders(frame: FrameType) -> bool:
    """Returns True if a frame belongs to torch or to a folder of ``_OURS``."""
    return frame.f_code.co_filename.startswith(_PACKAGES)


def is_users(frame: FrameType) -> bool:
    """Returns True if a frame belongs neither to torch, one of ``_LIBRARIES``, Python's library nor ``_OURS``."""
    name = frame.f_code.co_filename
    root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return not name.startswith((*_PACKAGES, "<")) and root not in _LIBRARIES and not _is_standard(name)


def line_within(code: CodeType | None) -> Line:
    """Returns the current line of the function ``code``; None if it is not on this stack."""
    frame: FrameType | None = sys._getframe(1) if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_lineno


def _is_standard(name: str) -> bool:
    """Returns True for a file of Python's standard library, such as contextlib between a call and its caller."""
    return name.startswith(_STANDARD) and "site-packages" not in name
