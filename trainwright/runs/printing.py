"""Makes text safe for a terminal: without control characters, and encodable."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and characters that change the text direction."""
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]"
)
"""Control characters, and characters that are not shown or change the direction of text: a language model reads the
text that they spell, but a person does not see it."""


def readable(text: str) -> str:
    """Return ``text`` with lone surrogates escaped, which no encoding can write, as in file names that are no UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    r"""Return ``text`` with control characters escaped: ``\x1b[2J`` is shown instead of clearing the screen."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], readable(text))


def visible(text: str) -> str:
    """Return ``text`` with every invisible character escaped, for a text that a language model may read."""
    return INVISIBLE.sub(lambda found: ascii(found[0])[1:-1], readable(text))


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def figure(value: float) -> str:
    """Return a loss with four significant digits, such as `2.912`, `0.01234` and `1.234e-05`."""
    if not math.isfinite(value):
        return "not finite"
    text = f"{value:#.4g}"
    return text.removesuffix(".")
