"""Handles warnings of the user's code: a replay does not repeat them, and the recorder's operations cause none."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch.overrides

from trainwright.recorder.callers import calling_frame, is_users

ShowWarning = Callable[..., None]
_PACKAGE = f"{Path(__file__).parents[1]}/"
_ROOMS = frozenset({"recorder", "replay", "watching", "doctor"})
_PASSING_ON = frozenset({"hooks.py", "object_hooks.py", "function_hooks.py", "calls.py", "user_warnings.py"})
"""Files of the recorder whose functions call the originals that they have replaced."""
_TAPE, _OVERRIDES = str(Path(__file__).with_name("tape.py")), str(torch.overrides.__file__)


_silent: set[int] = set()
"""Threads that show no warnings."""
_replaced: list[ShowWarning] = []
"""``warnings.showwarning`` while a thread is silent, and the function that it replaces."""
_changing = threading.Lock()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Context in which this thread shows no warnings.

    Warning filters are not changed, because Python shows all warnings again after such a change. Threads may leave the
    context in any order, so they share the ``showwarning`` that the first thread has set.
    """
    thread = threading.get_ident()
    if thread in _silent:
        yield
        return
    with _changing:
        if not _silent:
            _silence()
        _silent.add(thread)
    try:
        yield
    finally:
        with _changing:
            _silent.discard(thread)
            if not _silent and warnings.showwarning is _replaced[0]:  # else other code has replaced it
                warnings.showwarning = _replaced[1]


def _silence() -> None:
    shown = warnings.showwarning

    def show(*args: object, **kwargs: object) -> None:
        if threading.get_ident() not in _silent:
            shown(*args, **kwargs)  # type: ignore[arg-type]

    warnings.showwarning = show
    _replaced[:] = show, shown


def _is_of_the_recorder() -> bool:
    """Returns True if the running code is this package's, and not user code that it calls."""
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
    """Returns a ``showwarning`` that drops the recorder's warnings, and moves those of the tape to the user's line.

    Python shows a warning once for each location. If the tape calls a function that warns, the location is in the tape.
    The warning is therefore issued again at the user's line, so that it is shown once there, as without the tape.
    """

    def showwarning(message: Warning, category: type[Warning], filename: str, lineno: int, *rest: object) -> None:
        if _is_of_the_recorder():
            return
        frame = calling_frame() if filename == _TAPE else None
        site = None if frame is None else _without_tape(sys._getframe(1))
        if frame is None or site is None:
            original(message, category, filename, lineno, *rest)
            return
        registry = site.f_globals.setdefault("__warningregistry__", {})
        before, warnings.showwarning = warnings.showwarning, shown_at(frame)
        try:
            warnings.warn_explicit(message, category, site.f_code.co_filename, site.f_lineno, registry=registry)
        finally:
            warnings.showwarning = before

    def shown_at(frame: FrameType) -> ShowWarning:
        def show(message: object, category: type[Warning], filename: str, lineno: int, *rest: object) -> None:
            original(message, category, frame.f_code.co_filename, frame.f_lineno, *rest)

        return show

    return showwarning


def _without_tape(frame: FrameType | None) -> FrameType | None:
    """Returns the frame that calls the warning function, skipping the tape."""
    function: FrameType | None = None
    while frame is not None and frame.f_code.co_filename != _TAPE:
        function, frame = frame, frame.f_back
    while frame is not None and function is not None:
        name = frame.f_code.co_filename
        if name not in (_TAPE, _OVERRIDES) and frame.f_code is not function.f_code:
            return frame
        frame = frame.f_back
    return None
