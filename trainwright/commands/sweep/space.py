"""The search space of a sweep: one dimension per recipe path, and the syntax of ranges and choices."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.errors import UsageError
from trainwright.recipe.yaml_core import UnreadableError, read

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Scalar = None | bool | int | float | str
MAX_CHOICES = 1000
FORMS = "write log:1e-4..1e-1, 0.0..0.5, int:2..8, [a, b, c], or log:1e-4..1e-1:5 for five points"
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"((?:log:|int:|float:)*)({_NUMBER})\.\.({_NUMBER})(?::(\d+))?")


@dataclass(frozen=True)
class Dimension:
    """One path of the recipe and its values: the ``choices``, or a range from ``low`` to ``high``, both included."""

    path: str
    written: object
    choices: tuple[object, ...] = ()
    low: float = 0
    high: float = 0
    is_log: bool = False
    is_int: bool = False

    @property
    def grid(self) -> tuple[object, ...] | None:
        """Return all values; None for a range of floats."""
        if self.choices:
            return self.choices
        return tuple(range(int(self.low), int(self.high) + 1)) if self.is_int else None

    @property
    def checked_values(self) -> tuple[object, ...]:
        """Return the values that the schema must accept: all choices, or both ends."""
        return self.choices or (self.low, self.high)

    def distribution(self) -> BaseDistribution:
        """Return the distribution for Optuna. A choice that is a list or a mapping is represented by its JSON text."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution([label_of(each) for each in self.choices])
        if self.is_int:
            return IntDistribution(int(self.low), int(self.high), log=self.is_log)
        return FloatDistribution(self.low, self.high, log=self.is_log)

    def value_of(self, label: Scalar) -> object:
        """Return the value that ``label`` represents in Optuna."""
        return next((each for each in self.choices if label_of(each) == label), label)

    def __str__(self) -> str:
        if self.choices:
            return f"{self.path}: {', '.join(str(label_of(each)) for each in self.choices)}"
        kind = "whole numbers" if self.is_int else "numbers"
        return f"{self.path}: {kind} from {self.low:g} to {self.high:g}{', log scale' if self.is_log else ''}"


def label_of(value: object) -> Scalar:
    """Return a choice in a form that Optuna can store."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def setting_of(path: str, value: object) -> str:
    """Return the override that sets a value. JSON is valid YAML."""
    return f"{path}={json.dumps(value)}"


def grid_points(space: Sequence[Dimension]) -> list[tuple[object, ...]]:
    """Return all combinations; the last dimension varies fastest. Raises UsageError for a dimension without a finite
    grid.
    """
    grids = [each.grid for each in space]
    if any(grid is None for grid in grids):
        endless = next(each for each, grid in zip(space, grids, strict=True) if grid is None)
        raise UsageError(
            f"a grid needs the points of {endless.path}, which is a range of floats",
            remedy=f"write a list, or give a number of points: {endless.written}:5",
        )
    return list(itertools.product(*(grid for grid in grids if grid is not None)))


def parse_dimension(path: str, written: object, is_whole: Callable[[float], bool]) -> Dimension:
    """Read the range or the list of values of one path. Raises UsageError.

    For a range without ``int:`` or ``float:``, ``is_whole`` returns True if the path accepts whole numbers only.
    """
    if isinstance(written, str):
        text = written.strip()
        if found := _RANGE.fullmatch(text):
            return _range(path, text, found, is_whole)
        if ".." in text:
            raise UsageError(f"{text!r} is not a range of numbers", remedy=FORMS)
        if text[:1] + text[-1:] in ("{}", "[]"):
            try:
                written = read(f"[{text[1:-1]}]", path).value
            except UnreadableError as error:
                raise UsageError(f"{text!r} is not a list: {error.problem.rule}", remedy=FORMS) from None
    elif isinstance(written, Mapping) and written and all(value is None for value in written.values()):
        written = list(written)  # {a, b, c} in YAML
    if not isinstance(written, list | tuple):
        raise UsageError("is neither a range nor a list of values", remedy=FORMS)
    return _choices(path, written)


def _choices(path: str, values: Sequence[object]) -> Dimension:
    if not 0 < len(values) <= MAX_CHOICES:
        raise UsageError(f"has {len(values)} values", remedy=f"give between 1 and {MAX_CHOICES}")
    labels = [label_of(each) for each in values]
    twice = [each for n, each in enumerate(labels) if each in labels[:n]]
    if twice:
        raise UsageError(f"lists {twice[0]!r} twice", remedy="keep one of the two")
    return Dimension(path, list(values), tuple(values))


def _range(path: str, text: str, found: re.Match[str], is_whole: Callable[[float], bool]) -> Dimension:
    kinds, low, high, points = found[1], float(found[2]), float(found[3]), found[4]
    is_log, are_whole = "log:" in kinds, low == int(low) and high == int(high)
    if "int:" in kinds and ("float:" in kinds or not are_whole):
        raise UsageError(f"{text} is not a range of whole numbers", remedy="write for example int:2..8")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"{text} is an empty range", remedy="write the smaller number first: 1e-4..1e-1")
    if is_log and low <= 0:
        raise UsageError(f"{text} has no logarithm at {low:g}", remedy="begin above 0: log:1e-6..1e-1")
    is_int = "int:" in kinds or ("float:" not in kinds and are_whole and (is_whole(low) or is_whole(high)))
    if points is None:
        return Dimension(path, text, low=low, high=high, is_log=is_log, is_int=is_int)
    if not 2 <= int(points) <= MAX_CHOICES:
        raise UsageError(f"{text} has {points} points", remedy=f"give between 2 and {MAX_CHOICES}")
    return Dimension(path, text, tuple(dict.fromkeys(_points(low, high, int(points), is_log=is_log, is_int=is_int))))


def _points(low: float, high: float, count: int, *, is_log: bool, is_int: bool) -> list[float]:
    """Return equally spaced numbers with six significant digits. The ends are exact."""
    if is_log:
        inside = [low * (high / low) ** (n / (count - 1)) for n in range(1, count - 1)]
    else:
        inside = [low + (high - low) * n / (count - 1) for n in range(1, count - 1)]
    values = [low, *(float(f"{each:.6g}") for each in inside), high]
    return [round(each) for each in values] if is_int else values
