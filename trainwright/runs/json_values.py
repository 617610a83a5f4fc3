"""Types of JSON values, and the string forms of NaN and infinity, which JSON lacks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, overload

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""A JSON value of any nesting, for what is written, sent or passed on."""

Facts: TypeAlias = dict[str, Any]
"""A JSON object that was read, such as the values of one experiment, or one row of them.

The type of a field depends on its name, which a type checker cannot know. Use this alias for all such objects.
"""

Event: TypeAlias = tuple[str, Any]
"""One recorded event of an observed step: its kind, then a value that the kind defines (None if it has none)."""

NOT_IN_JSON = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The floats that JSON lacks, by the strings that represent them."""


@overload
def strict(value: Mapping[str, object]) -> dict[str, JsonValue]: ...


@overload
def strict(value: object) -> JsonValue: ...


def strict(value: object) -> Any:
    """Convert ``value`` to strict JSON values: NaN and infinity as strings, dataclasses and mappings as objects."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {strict(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value  # the encoder accepts or refuses anything else


def plain(value: object) -> Any:
    """Invert ``strict`` for a result of ``json.loads``: NaN and infinity become numbers again."""
    if isinstance(value, str):
        return NOT_IN_JSON.get(value, value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value
