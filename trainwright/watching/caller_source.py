"""The function that holds the loop: its source, and the numbers and modules that it has."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import TypeGuard

from torch import Tensor, nn

from trainwright.doctor.source import point_at

MOST = 32
"""Items of a container that are read."""
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
        """The numbers in its variables, and in what these hold: ``shown.1``, ``meter.avg``, ``past[-1]``."""
        names = dict(self._frame.f_locals) if self._frame is not None else {}
        numbers: dict[str, float] = {}
        for name, value in list(names.items())[: 8 * MOST]:
            if _is_number(value):
                numbers[name] = value
            elif not name.startswith("__"):
                numbers |= {f"{name}{key}": item for key, item in _held(value) if _is_number(item)}
        return numbers

    def modules(self) -> list[nn.Module]:
        """The modules in its variables, and in what these hold."""
        names = dict(self._frame.f_locals) if self._frame is not None else {}
        values = [value for name, value in list(names.items())[: 8 * MOST] if not name.startswith("__")]
        held = [item for value in values if not isinstance(value, nn.Module) for _, item in _held(value)]
        return [each for each in (*values, *held) if isinstance(each, nn.Module)]

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


def _held(value: object) -> Iterator[tuple[str, object]]:
    """The items of a container with their keys, of a list only the last; the attributes of an object of the user's."""
    if type(value) is list:
        for last in value[-1:]:
            yield "[-1]", last
            if type(last) in (dict, tuple):
                yield from ((f"[-1]{key}", item) for key, item in _held(last))
        return
    if type(value) is dict:
        items: Iterable[tuple[object, object]] = list(value.items())
    elif isinstance(value, tuple):
        items = enumerate(value)
    elif isinstance(value, _CLOSED) or type(value).__module__.partition(".")[0] in ("torch", "builtins"):
        return
    else:
        items = list(getattr(value, "__dict__", {}).items())
    for key, item in islice(items, MOST):
        yield f".{key}", item
