"""The function that holds the loop: its source, and the numbers and modules that it has."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import TypeGuard

from torch import Tensor, nn

from trainwright.doctor.source import point_at

MOST = 32
"""Items of a container that are read."""
DEPTH = 3
"""Containers within each other that are looked into: ``trainer.history["val_loss"][-1]``."""
_CLOSED = (nn.Module, Tensor, ModuleType, FunctionType, type)
"""Values that are not looked into."""


class CallerSource:
    """The function or script that holds the loop: its source, read when a finding asks for a line; its values."""

    def __init__(self) -> None:
        self._code: CodeType | None = None
        self._frame: FrameType | None = None
        self._globals: dict[str, object] = {}

    def look_at(self, frame: FrameType) -> None:
        """``frame`` is where the ``with`` stands."""
        self._code, self._globals, self._frame = frame.f_code, frame.f_globals, frame

    def code(self) -> CodeType | None:
        """The function that holds the loop."""
        return self._code

    def numbers(self) -> dict[str, float]:
        """The numbers in its variables, and in what these hold: ``past[-1]``, ``self.history.val_acc[-1]``."""
        return {name: value for name, value in self._named() if _is_number(value)}

    def modules(self) -> list[nn.Module]:
        """The modules in its variables, and in what these hold."""
        return [each for each in self.values() if isinstance(each, nn.Module)]

    def values(self) -> list[object]:
        """What its variables stand for, and what these hold; not what a module holds."""
        return [value for _, value in self._named()]

    def _named(self) -> Iterator[tuple[str, object]]:
        names = dict(self._frame.f_locals) if self._frame is not None else {}
        for name, value in list(names.items())[: 8 * MOST]:
            if not name.startswith("__"):
                yield name, value
                yield from ((f"{name}{key}", item) for key, item in islice(_held(value), 8 * MOST))

    def forget(self) -> None:
        """The loop is over: its function may go."""
        self._frame = None

    def line_of(self, code: str) -> str | None:
        """``file.py:42``; None where the source does not show it, or is not there."""
        if self._code is None:
            return None
        lines, first = self._source()
        pointer = point_at(code, "".join(lines), first_line=max(1, first))
        return f"{Path(self._code.co_filename).name}:{pointer.line}" if pointer else None

    def _source(self) -> tuple[list[str], int]:
        """The lines of the function, or of the whole file where the ``with`` stands in none; and which is the first."""
        assert self._code is not None
        if self._code.co_name == "<module>":
            return linecache.getlines(self._code.co_filename, self._globals), 1
        try:
            return inspect.getsourcelines(self._code)
        except (OSError, TypeError):
            return [], 1


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) is float or type(value) is int


def _held(value: object, depth: int = DEPTH) -> Iterator[tuple[str, object]]:
    """What a container or an object of the user's holds, by its way there; also what containers in it hold."""
    for key, item in islice(_items(value), MOST):
        yield key, item
        if depth > 1 and type(item) in (list, dict, tuple):
            yield from ((f"{key}{inner}", part) for inner, part in _held(item, depth - 1))


def _items(value: object) -> Iterator[tuple[str, object]]:
    """The items of a container with their keys, of a list only the last; the attributes of an object of the user's."""
    if type(value) is list:
        yield from (("[-1]", last) for last in value[-1:])
    elif type(value) is dict:
        yield from ((f".{key}", item) for key, item in list(islice(value.items(), MOST)))
    elif isinstance(value, tuple):
        yield from ((f".{place}", item) for place, item in enumerate(value))
    elif not isinstance(value, _CLOSED) and type(value).__module__.partition(".")[0] not in ("torch", "builtins"):
        attributes = getattr(value, "__dict__", {})
        yield from ((f".{key}", item) for key, item in list(islice(attributes.items(), MOST)))
