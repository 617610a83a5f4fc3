"""The type of ``args:``: only plain values, so that every recipe can be written and read back unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from trainwright.errors import Problem, RecipeError
from trainwright.recipe.formatting import LARGEST_INT, format_value, readable

MAX_DEPTH = 50
MAX_VALUES = 10_000  # the same limit as for the nodes of a YAML file

_ONLY = "may hold text, numbers, true, false, null, lists and mappings with text keys only"


class _Copy:
    """Copies ``args`` and collects every problem, with paths relative to ``args``."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.count = 0

    def copy(self, value: object, path: tuple[str, ...]) -> object:
        self.count += 1
        if self.count > MAX_VALUES:
            return None
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (int, float)):
            return self._number(value, path)
        if isinstance(value, str):
            return self._encodable(value, path)
        if isinstance(value, (dict, list, tuple)):
            return self._container(value, path)
        self._wrong(path, _ONLY, type(value).__name__, "give the name of the thing and look it up in your code")
        return None

    def _container(self, value: Mapping[object, object] | Sequence[object], path: tuple[str, ...]) -> object:
        if len(path) > MAX_DEPTH:
            self._wrong(path[:3], f"may nest at most {MAX_DEPTH} levels deep", "", "flatten it")
            return None
        if not isinstance(value, Mapping):
            return [self.copy(item, (*path, str(index))) for index, item in enumerate(value)]
        result: dict[str, object] = {}
        for key, item in value.items():
            if isinstance(key, str):
                result[str(self._encodable(key, path))] = self.copy(item, (*path, key))
            else:
                self._wrong(
                    path, "keys must be text", format_value(key), f"put quotes around it: '{format_value(key)}'"
                )
        return result

    def _number(self, value: float, path: tuple[str, ...]) -> float | None:
        if isinstance(value, int):
            if abs(value) > LARGEST_INT:
                self._wrong(path, "must fit into 64 bits", format_value(value), "write it as a float, e.g. 1e30")
                return None
            return int(value)
        if math.isnan(value):
            self._wrong(path, "must not be NaN", ".nan", "write a number, or null for none")
            return None
        return float(value)

    def _encodable(self, text: str, path: tuple[str, ...]) -> str | None:
        if readable(text) != text:
            self._wrong(path, "must be valid Unicode text", format_value(text), "write the character itself")
            return None
        return str(text)

    def _wrong(self, path: tuple[str, ...], rule: str, got: str, remedy: str) -> None:
        self.problems.append(Problem(readable(".".join(path)), rule, got=got, remedy=remedy))


def _plain(value: object) -> object:
    """Return a deep copy of ``args`` with lists for tuples. Raises RecipeError (paths relative to ``args``)."""
    if not isinstance(value, dict):
        return value  # pydantic reports it
    copying = _Copy()
    result = copying.copy(value, ())
    if copying.count > MAX_VALUES:
        raise RecipeError(Problem("", f"may hold at most {MAX_VALUES} values", remedy="put them into a file"))
    if copying.problems:
        raise RecipeError(copying.problems)
    return result


Args = Annotated[dict[str, Any], BeforeValidator(_plain)]
