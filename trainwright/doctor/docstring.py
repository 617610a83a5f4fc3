"""Reads the page of a check from its docstring."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

SECTIONS = (
    "Why it matters",
    "How it is detected",
    "Exceptions",
    "Usual cause",
    "Looks like",
    "Fix",
    "Sources",
)
"""The sections in order. A section begins on a line of its own, with its title and a colon."""
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):\s*", re.MULTILINE)

_TEXT_END = re.compile(r"\n\s*\n|\n {4}")  # A blank line or a code block ends the text of a section
_NAME = re.compile(r"[\w-]+([./_#]\w|://| PR \d| #\d)")
"""A code, address, repository with a number, or function. A text that begins with one keeps its first letter."""


@dataclass(frozen=True)
class Page:
    """The page of a check. ``what`` describes the fault; its first sentence is the title."""

    what: str
    sections: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The first sentence."""
        return re.split(r"(?<=\.)\s", " ".join(self.what.split()), maxsplit=1)[0]

    @property
    def further(self) -> str:
        """The text after the title, on one line and without its final period."""
        return " ".join(self.what.split())[len(self.title) :].strip().rstrip(".")

    def words(self, section: str) -> str:
        """Returns a section as one line without its code blocks; "" if there is none."""
        return " ".join(_TEXT_END.split(self.sections.get(section, ""), maxsplit=1)[0].split()).rstrip(".")

    def translated(self, code: str, translate: Callable[[str], str]) -> str:
        """Returns the page with a translation of titles and texts. Code blocks, codes and sources are unchanged."""
        parts = [f"## {code}", *map(translate, filter(None, [self.title.rstrip("."), self.further]))]
        for title in (each for each in SECTIONS if each in self.sections):
            text = self.sections[title]
            code_blocks = text[len(_TEXT_END.split(text, maxsplit=1)[0]) :]
            parts.append(f"**{translate(title)}**：{translate(self.words(title))}{code_blocks}")
        return "\n\n".join(parts)

    def markdown(self, code: str) -> str:
        """Returns the page as it is printed and written into the docs."""
        parts = [f"## {code}", self.what]
        there = [(title, self.sections[title]) for title in SECTIONS if title in self.sections]
        parts += [f"**{title}.** {text if _NAME.match(text) else text[:1].upper() + text[1:]}" for title, text in there]
        return "\n\n".join(parts)


def parse_page(docstring: str) -> Page:
    """Splits a docstring into its first part and its sections."""
    first, _, rest = docstring.strip().partition("\n")
    text = f"{first}\n{textwrap.dedent(rest)}"
    what, *parts = _SECTION.split(text)
    return Page(what.strip(), {title: part.strip() for title, part in zip(parts[::2], parts[1::2], strict=True)})
