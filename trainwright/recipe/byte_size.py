"""Parses sizes of memory: ``24GiB``, ``80GB``, ``500MiB``."""

from __future__ import annotations

import re

from trainwright.errors import UsageError

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
