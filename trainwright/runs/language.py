"""Translates the output, line by line, with a catalogue from ``languages``.

A catalogue maps English lines to translated lines. ``{name}`` matches any text, which is copied. The text that
``{text...}`` matches is translated separately, and so is each part between semicolons of ``{texts...}`` and between
commas of ``{list...}``. ``{s}`` is an English ending, possibly empty. ``{code}`` is the code of a check, ``{figure}``
matches one number, and the names in ``COUNTS`` match integers. Lines without an entry stay English. Logs, ``--json``
and answers to agents are always English.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

VARIABLE = "TRAINWRIGHT_LANG"
_LOCALE_VARIABLES = (VARIABLE, "LC_ALL", "LC_MESSAGES", "LANG")
LANGUAGES = ("en", "zh")
PLACEHOLDER = re.compile(r"\{([a-z]\w*)\}")
FIGURE = "figure"
"""The name of a placeholder for one number, with an exponent or a percent sign if it has one, or ``nan``."""
COUNTS = ("n", "m", "step", "since", "steps", "planned", "all", "every")
MAX_LINE_CHARS = 4000
"""Longer lines stay English: they contain text of a run, and matching takes time."""


def language(environ: Mapping[str, str] = os.environ) -> str:
    """Return the language of the output: that of the first locale variable that is set, English if unsupported."""
    value = next((environ[name] for name in _LOCALE_VARIABLES if environ.get(name)), "en")
    found = re.split("[_.@-]", value.lower())[0]
    return found if found in LANGUAGES else "en"


def translated(text: str) -> str:
    """Return a text whose lines are translated if the catalogue contains them."""
    name = language()
    return text if name == "en" else catalogue(name).text(text)


@cache
def catalogue(name: str) -> Catalogue:
    """Return the catalogue of a language. It is read at the first use."""
    folder = files("trainwright.runs").joinpath("languages")
    return Catalogue(json.loads(folder.joinpath(f"{name}.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class _Template:
    pattern: re.Pattern[str]
    line: str


class Catalogue:
    """Translates lines. ``lines`` maps English lines to translated ones."""

    def __init__(self, lines: Mapping[str, str]) -> None:
        self.lines = lines
        self._templates = [_Template(_pattern(key), line) for key, line in lines.items() if PLACEHOLDER.search(key)]

    def text(self, text: str) -> str:
        return "\n".join(map(self.line, text.split("\n")))

    def line(self, line: str) -> str:
        """Return a line with its indentation; unchanged if it is not in the catalogue."""
        bare = line.strip()
        if not bare or len(line) > MAX_LINE_CHARS:
            return line
        return line.replace(bare, self._bare(bare), 1)

    def _bare(self, text: str) -> str:
        if text in self.lines:
            return self.lines[text]
        for each in self._templates:
            if found := each.pattern.fullmatch(text):
                parts = PLACEHOLDER.split(each.line)  # literal, name, literal, ...
                parts[1::2] = [self._value(name, found[name]) for name in parts[1::2]]
                return "".join(parts)
        return text

    def _value(self, name: str, value: str) -> str:
        if name.startswith("texts"):
            return "；".join(self.line(part) for part in value.split("; "))
        if name.startswith("list"):
            return "，".join(self.line(part) for part in value.split(", "))
        return self.line(value) if name.startswith("text") else value


def _pattern(key: str) -> re.Pattern[str]:
    parts = PLACEHOLDER.split(key)  # literal, name, literal, ...
    kinds = dict.fromkeys(COUNTS, "[0-9,]+") | {
        "s": "[a-z]*",
        FIGURE: r"[-+.,0-9]+(?:e[-+]?[0-9]+)?%?|-?(?:nan|inf)",
        "code": r"[a-z_]+[.]\w+",
    }
    names = [f"(?P<{name}>{kinds.get(name, '.+?')})" for name in parts[1::2]]
    return re.compile("".join(f"{re.escape(literal)}{name}" for literal, name in zip(parts[::2], [*names, ""])))
