"""The warnings of the user's code: a replay does not show them again, and none is of the recorder's own operations."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trainwright.recorder.callers import calling_frame, is_users

_PACKAGE = f"{Path(__file__).parents[1]}/"
_ROOMS = frozenset({"recorder", "replay", "watching", "doctor"})
_PASSING_ON = frozenset(
    {"hooks.py", "object_hooks.py", "function_hooks.py", "rank_hooks.py", "calls.py", "user_warnings.py"}
)
"""Files of the recorder with functions that call what they have replaced."""
_TAPE = str(Path(__file__).with_name("tape.py"))
ShowWarning = Callable[..., None]


@contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, this thread shows no warnings. The filters stay: once they change, Python shows every warning again."""
    thread, shown = threading.get_ident(), warnings.showwarning

    def show(*args: object, **kwargs: object) -> None:
        if threading.get_ident() != thread:
            shown(*args, **kwargs)  # type: ignore[arg-type]

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:  # else somebody else has replaced it
            warnings.showwarning = shown


def is_of_the_recorder() -> bool:
    """Whether the code that runs is this package's own, and not the user's that it passes a call on to."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            room, _, file = code.co_filename.removeprefix(_PACKAGE).partition("/")
            passes_on = room == "recorder" and (file in _PASSING_ON or code.co_name == "__torch_function__")
            if room in _ROOMS and not passes_on:
                return True
        elif is_users(frame):
            return False
        frame = frame.f_back
    return False


def at_the_caller(original: ShowWarning) -> ShowWarning:
    """Shows a warning of a function that the tape calls as one of the user's line that calls it."""

    def showwarning(message: object, category: type[Warning], filename: str, lineno: int, *rest: object) -> None:
        frame = calling_frame() if filename == _TAPE else None
        place = (filename, lineno) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        original(message, category, *place, *rest)

    return showwarning
