"""Durations of training: ``1000steps``, ``2ep``, ``0.1run``, ``90min``, ``5Mtok``.

A `Duration` keeps the unit in which it was written. The plan, which has data and machine, converts it to steps.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import Literal, cast

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from trainwright.errors import UsageError

Unit = Literal["steps", "ep", "s", "tok", "run", "samples", "USD", "kWh"]
BUDGETS = ("USD", "kWh")
"""Units of a cost limit. Only ``until``, the length of a run, accepts them."""

# Accepted spellings -> (unit, factor).
SPELLINGS: dict[str, tuple[Unit, float]] = {
    "steps": ("steps", 1),
    "step": ("steps", 1),
    "ep": ("ep", 1),
    "epoch": ("ep", 1),
    "epochs": ("ep", 1),
    "s": ("s", 1),
    "min": ("s", 60),
    "h": ("s", 3600),
    "tok": ("tok", 1),
    "ktok": ("tok", 1e3),
    "Mtok": ("tok", 1e6),
    "Gtok": ("tok", 1e9),
    "samples": ("samples", 1),
    "run": ("run", 1),
    "USD": ("USD", 1),
    "kWh": ("kWh", 1),
}
EXAMPLES = "1000steps, 2ep, 90min, 5Mtok, 50000samples, 0.1run"
PATTERN = r"^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?(" + "|".join(SPELLINGS) + r")$"

_WHOLE_UNITS = ("steps", "tok", "samples")
_MAX_VALUE = 2.0**53  # the largest integer up to which floats have no gaps
_NUMBER_AND_REST = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(.*)", re.DOTALL)


def _error(rule: str, remedy: str = f"write for example {EXAMPLES}") -> UsageError:
    return UsageError(rule, remedy=remedy)


@dataclass(frozen=True)
class Duration:
    """``value`` of ``unit``: steps, ep(ochs), s(econds), tok(ens), samples, run (a fraction of it), or USD and kWh.

    Raises UsageError if the value is negative, not finite, a fraction of a step, token or sample, or more than 1run.
    """

    value: float
    unit: Unit

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise _error("a duration must be finite")
        if self.value < 0:
            raise _error("a duration must not be negative")
        if self.value > _MAX_VALUE:
            raise _error(f"a duration must be at most 2^53 {self.unit}")
        if self.unit in _WHOLE_UNITS and self.value != int(self.value):
            raise _error(f"{self.unit} are counted whole", f"write {math.ceil(self.value)}{self.unit}")
        if self.unit == "run" and self.value > 1:
            raise _error("a fraction of the run is at most 1run", "write for example 0.1run for a tenth of the run")

    @classmethod
    def parse(cls, text: str, *, allow_zero: bool = False) -> Duration:
        """Parse text such as ``1000steps``. Raises UsageError with a remedy."""
        number, spelling = _number_and_unit(text)
        unit, factor = SPELLINGS[spelling]
        duration = cls(_scale(number, factor), unit)
        if duration.value == 0 and not allow_zero:
            raise _error("a duration must be more than 0")
        return duration

    def __str__(self) -> str:
        is_whole = self.value == int(self.value)
        return f"{int(self.value) if is_whole else self.value!r}{self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return DurationField().__get_pydantic_core_schema__(source, handler)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return DurationField().__get_pydantic_json_schema__(schema, handler)


@dataclass(frozen=True)
class DurationField:
    """How pydantic parses a Duration. ``allow_zero`` permits ``0steps``, ``allow_budget`` also ``5USD``."""

    allow_zero: bool = False
    allow_budget: bool = False

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.read,
            serialization=core_schema.plain_serializer_function_ser_schema(str),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "pattern": PATTERN, "examples": EXAMPLES.split(", ")}

    def read(self, value: object) -> Duration:
        """Return the Duration of a value in a recipe. Raises UsageError, which is a ValueError as pydantic requires."""
        duration = self._read(value)
        if duration.unit in BUDGETS and not self.allow_budget:
            raise _error(f"{duration.unit} can only be the length of the run (until)")
        return duration

    def _read(self, value: object) -> Duration:
        if isinstance(value, Duration):
            if value.value == 0 and not self.allow_zero:
                raise _error("a duration must be more than 0")
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            raise _without_unit(f"{value:g}" if abs(value) < _MAX_VALUE else "1000")
        if not isinstance(value, str):
            raise _error("must be a number with a unit")
        return Duration.parse(value, allow_zero=self.allow_zero)


def _number_and_unit(text: str) -> tuple[str, str]:
    match = _NUMBER_AND_REST.fullmatch(text)
    if match is None:
        raise _error("must be a number with a unit")
    number, spelling = cast("tuple[str, str]", match.groups())
    if spelling in SPELLINGS:
        return number, spelling
    if not spelling.strip():
        raise _without_unit(number)
    if spelling.strip() in SPELLINGS:
        raise _error("must be a number with a unit, without spaces", f"write {number}{spelling.strip()}")
    close = difflib.get_close_matches(spelling.strip(), SPELLINGS, n=1, cutoff=0.5)
    units = f"units are {', '.join(SPELLINGS)}"
    raise _error(
        f"{spelling.strip()[:20]!r} is not a unit",
        f"did you mean {number}{close[0]}? {units}" if close else units,
    )


def _without_unit(number: str) -> UsageError:
    rule = "a duration needs a unit: which unit?"
    units = ("steps", "ep", "s", "tok") if float(number) >= 1 else ("run", "ep", "s", "h")
    return _error(rule, f"write {', '.join(number + unit for unit in units[:-1])} or {number}{units[-1]}")


def _scale(number: str, factor: float) -> float:
    value = float(number) * factor
    # 1.1ktok is 1100.0000000000002 in binary and must become 1100
    return (
        float(round(value)) if abs(value) < _MAX_VALUE and math.isclose(value, round(value), rel_tol=1e-14) else value
    )
