"""The warnings of the user's code: a replay does not show them again, and none names a file of this package."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainwright.recorder.callers import calling_frame

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
        warnings.showwarning = shown


def at_the_caller(original: ShowWarning) -> ShowWarning:
    """Shows a warning of a function that the tape calls as one of the user's line that calls it."""

    def showwarning(message: object, category: type[Warning], filename: str, lineno: int, *rest: object) -> None:
        frame = calling_frame() if filename == _TAPE else None
        place = (filename, lineno) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        original(message, category, *place, *rest)

    return showwarning
