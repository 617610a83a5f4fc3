"""Formats bytes and seconds in the unit that is easiest to read."""

from __future__ import annotations

import math


def human_bytes(count: float) -> str:
    """Return text such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:  # from here on, three digits would print as 1e+03
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def human_seconds(seconds: float) -> str:
    """Return text such as `12 ms`, `3.2 s`, `4 min 10 s` or `2 h 5 min`."""
    if not math.isfinite(seconds):
        return "not finite"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
