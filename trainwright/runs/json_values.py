"""What JSON can hold, as types; and NaN and infinity, which it cannot hold, spelled as strings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, overload

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""A value that JSON can hold, of any nesting: for what is written, sent or passed on."""

Facts: TypeAlias = dict[str, Any]
"""A JSON object that was read, whose reader knows the type of each field by its name: the values of one experiment,
one row of them. Python cannot check these types; this alias is the one place that says so.
"""

Event: TypeAlias = tuple[str, Any]
"""One event of a watched step as it is recorded: its kind, then a value that the kind defines (None where none)."""

NOT_IN_JSON = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The floats that JSON does not have, by the strings that stand for them."""


@overload
def strict(value: Mapping[str, object]) -> dict[str, JsonValue]: ...


@overload
def strict(value: object) -> JsonValue: ...


def strict(value: object) -> Any:
    """``value`` as strict JSON can hold it: NaN and infinity spelled out, dataclasses and mappings as objects."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {strict(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value  # whatever else it is, the encoder accepts or refuses it


def plain(value: object) -> Any:
    """The inverse of ``strict`` for what ``json.loads`` returned: NaN and infinity are numbers again."""
    if isinstance(value, str):
        return NOT_IN_JSON.get(value, value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value
