"""The function that contains the user's loop, and the objects in its variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType

from torch import Tensor, nn

from trainwright.recorder.callers import is_users

MOST = 32
"""Maximum number of items of a container that are read."""
DEPTH = 3
"""Depth of nested containers that are read: ``trainer.history["val_loss"][-1]``."""
_CLOSED = (nn.Module, Tensor, ModuleType, type)
"""Types of values whose contents are not read."""


class CallerSource:
    """The function or script that contains the loop, and its values."""

    def __init__(self) -> None:
        self._code: CodeType | None = None
        self._frame: FrameType | None = None

    def begin(self, frame: FrameType) -> None:
        """Stores the frame of the ``with`` statement."""
        self._code, self._frame = frame.f_code, frame

    def code(self) -> CodeType | None:
        """Returns the function that contains the loop."""
        return self._code

    def frames(self) -> list[FrameType]:
        """Returns the frame of the loop and those of its callers, the innermost first; [] after the loop."""
        found: list[FrameType] = []
        frame = self._frame
        while frame is not None and is_users(frame) and len(found) < MOST:
            found.append(frame)
            frame = frame.f_back
        return found

    def modules(self) -> list[nn.Module]:
        """Returns the modules in the variables of the function, and in the contents of these variables."""
        return modules_of(self._frame)

    def values(self) -> list[object]:
        """Returns the values of the function's variables and their contents, except the contents of modules."""
        return _values_of(self._frame)

    def forget(self) -> None:
        """Releases the function of a finished loop."""
        self._frame = None


def modules_of(frame: FrameType | None) -> list[nn.Module]:
    """Returns the modules in the variables of a function and in their contents, such as the closure of a loss."""
    return [each for each in _values_of(frame) if isinstance(each, nn.Module)]


def _values_of(frame: FrameType | None) -> list[object]:
    values: list[object] = []
    for name, value in list(dict(frame.f_locals).items())[: 8 * MOST] if frame is not None else ():
        if not name.startswith("__"):
            values += [value, *islice(_held(value), 8 * MOST)]
    return values


def _held(value: object, depth: int = DEPTH) -> Iterator[object]:
    """Yields the contents of a container or a user object, and those of nested containers."""
    for item in islice(_items(value), MOST):
        yield item
        if depth > 1 and type(item) in (list, dict, tuple):
            yield from _held(item, depth - 1)


def _items(value: object) -> Iterable[object]:
    """Returns the items of a container (of a list only the last ones), or the attributes of a user object.

    Of a function they are the variables that it uses from the surrounding function.
    """
    if type(value) is list:
        return value[-1:]
    if type(value) is dict:
        return list(islice(value.values(), MOST))
    if isinstance(value, tuple):
        return value
    if isinstance(value, FunctionType):
        return _surrounding(value)
    if isinstance(value, _CLOSED) or type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        return ()
    return list(islice(getattr(value, "__dict__", {}).values(), MOST))


def _surrounding(function: FunctionType) -> Iterator[object]:
    """Yields the values of the variables that a function uses from the surrounding function."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
