"""The function that holds the loop, and the objects in its variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType

from torch import Tensor, nn

MOST = 32
"""Items of a container that are read."""
DEPTH = 3
"""Containers within each other that are looked into: ``trainer.history["val_loss"][-1]``."""
_CLOSED = (nn.Module, Tensor, ModuleType, FunctionType, type)
"""Values that are not looked into."""


class CallerSource:
    """The function or script that holds the loop, and its values."""

    def __init__(self) -> None:
        self._code: CodeType | None = None
        self._frame: FrameType | None = None

    def look_at(self, frame: FrameType) -> None:
        """``frame`` is where the ``with`` stands."""
        self._code, self._frame = frame.f_code, frame

    def code(self) -> CodeType | None:
        """The function that holds the loop."""
        return self._code

    def modules(self) -> list[nn.Module]:
        """The modules in its variables, and in what these hold."""
        return [each for each in self.values() if isinstance(each, nn.Module)]

    def values(self) -> list[object]:
        """What its variables stand for, and what these hold; not what a module holds."""
        values: list[object] = []
        names = dict(self._frame.f_locals) if self._frame is not None else {}
        for name, value in list(names.items())[: 8 * MOST]:
            if not name.startswith("__"):
                values += [value, *islice(_held(value), 8 * MOST)]
        return values

    def forget(self) -> None:
        """The loop is over: its function may go."""
        self._frame = None


def _held(value: object, depth: int = DEPTH) -> Iterator[object]:
    """What a container or an object of the user's holds, and what containers in it hold."""
    for item in islice(_items(value), MOST):
        yield item
        if depth > 1 and type(item) in (list, dict, tuple):
            yield from _held(item, depth - 1)


def _items(value: object) -> Iterable[object]:
    """The items of a container, of a list only the last; the attributes of an object of the user's."""
    if type(value) is list:
        return value[-1:]
    if type(value) is dict:
        return list(islice(value.values(), MOST))
    if isinstance(value, tuple):
        return value
    if isinstance(value, _CLOSED) or type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        return ()
    return list(islice(getattr(value, "__dict__", {}).values(), MOST))
