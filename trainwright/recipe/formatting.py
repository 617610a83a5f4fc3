"""Formats a value for a message: as YAML writes it, on one line, cut short. Never raises."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainwright.runs.printing import readable as readable

LARGEST_INT = 2**63 - 1
_MAX_TEXT_CHARS = 60


def format_value(value: object) -> str:
    """Return ``value`` as text for the "got" of a problem."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(float(value)) if math.isfinite(value) else f".{value}".replace(".-", "-.")
    if isinstance(value, str):
        return readable(repr(value if len(value) <= _MAX_TEXT_CHARS else value[:_MAX_TEXT_CHARS] + "..."))
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)} key{'' if len(value) == 1 else 's'}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return f"an object of type {type(value).__name__}"
