"""Formats a value for a message: as YAML writes it, on one line, cut short. Never raises."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from trainwright.errors import UsageError
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


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZES = {unit.lower(): size for unit, size in UNITS.items()}
_PATTERN = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+) ?(" + "|".join(_SIZES) + ")", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return bytes: ``12GiB`` is 12 * 2**30, ``12GB`` 12 * 10**9; case does not matter. Raises UsageError."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        number = re.match(r"[0-9]+\.?[0-9]*", text.strip())
        example = f"{number.group()}GiB" if number else "12GiB"
        raise UsageError(f"{text!r} is not a size of memory", remedy=f"write for example {example}, or 800MiB")
    count = int(float(match.group(1)) * _SIZES[match.group(2).lower()])
    if not 0 < count < 1 << 60:
        raise UsageError(f"{text!r} is not a size of memory", remedy="it must be more than 0 and less than 1EiB")
    return count
