"""Formats losses, the same on the terminal, in a file, on a page and in the verdict."""

from __future__ import annotations

import math


def figure(value: float) -> str:
    """Return a loss with four significant digits, such as `2.912`, `0.01234` and `1.234e-05`."""
    if not math.isfinite(value):
        return "not finite"
    text = f"{value:#.4g}"
    return text.removesuffix(".")
