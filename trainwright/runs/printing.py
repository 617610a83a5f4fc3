"""Text for a terminal: nothing in it is a command to the terminal, and all of it can be encoded."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, and those that change the direction of what is shown."""


def readable(text: str) -> str:
    """Returns ``text`` with what cannot be encoded escaped: lone surrogates, of a name that is not UTF-8 for one."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    """Returns ``text`` with control characters escaped: ``\\x1b[2J`` is shown instead of clearing the screen."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], readable(text))
