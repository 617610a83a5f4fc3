"""The warnings of the user's code: a replay does not show them again, and none names a file of this package."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch.overrides

from trainwright.recorder.callers import calling_frame

_TAPE, _OVERRIDES = str(Path(__file__).with_name("tape.py")), str(torch.overrides.__file__)
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
        warnings.showwarning = shown


def at_the_caller(original: ShowWarning) -> ShowWarning:
    """Shows a warning of a function that the tape calls as one of the user's line that calls it.

    Python shows a warning once for each place, and the tape is another place than the line that calls the function
    without it. So the warning is issued again at that line: it is shown once, whether the tape runs or not.
    """

    def showwarning(message: Warning, category: type[Warning], filename: str, lineno: int, *rest: object) -> None:
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
    """The frame that calls the function which has warned, as if the tape did not stand between them."""
    function: FrameType | None = None
    while frame is not None and frame.f_code.co_filename != _TAPE:
        function, frame = frame, frame.f_back
    while frame is not None and function is not None:
        name = frame.f_code.co_filename
        if name not in (_TAPE, _OVERRIDES) and frame.f_code is not function.f_code:
            return frame
        frame = frame.f_back
    return None
