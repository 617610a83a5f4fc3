"""The pages of ``trainwright explain CODE``: what a finding means, its look-alikes, its remedies, where it was seen.

They lie in the ``page.md`` of a family, one ``## code`` each, and in ``doctor/page.md`` what is of none;
those of laws in the ``laws.md`` of their family, one ``## law`` each. Nothing is imported to read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from trainwright.errors import UsageError, suggest

FOLDER = Path(__file__).parent
SECTIONS = ("What", "Why it matters", "Look-alikes", "Remedies", "Sources")
"""In the order of a page; ``Sources`` is left out where there is none to name."""
LAW_SECTIONS = ("Statement", "Tolerance", "Exceptions", "Delay", "When it is broken", "Source")
"""In the order of the page of a law."""


def codes() -> tuple[str, ...]:
    """Every code of a known cause, sorted: each has a page."""
    return tuple(_pages())


def law_codes() -> tuple[str, ...]:
    """``law.<family>.<law>`` for every law, sorted: each has a page too."""
    return tuple(_pages_of_laws())


def page(code: str) -> str:
    """The page of a code; for a group such as ``num.``, its codes with their titles; for "" all codes.

    Raises UsageError for a code that has no page, with the nearest ones that have.
    """
    if code.startswith("law.own."):
        raise UsageError(f"{code} has no page: it is a law of your own", remedy="see the docstring of its function")
    if text := _pages().get(code) or _pages_of_laws().get(code):
        return text
    group = [each for each in (*codes(), *law_codes()) if not code or each.startswith(f"{code.removesuffix('.')}.")]
    if not group:
        raise UsageError(f"there is no page for {code!r}", remedy=_nearest(code))
    width = max(map(len, group))
    return "\n".join(f"{each:{width}}  {title(each)}" for each in group)


def title(code: str) -> str:
    """What the code means, in one line: the first sentence of its page."""
    text = _pages().get(code) or _pages_of_laws().get(code)
    if text is None:
        raise UsageError(f"there is no page for {code!r}", remedy=_nearest(code))
    first = SECTIONS[0] if code in _pages() else LAW_SECTIONS[0]
    words = " ".join(text.split())
    return re.split(r"(?<=\.) ", words.partition(f"**{first}.** ")[2], maxsplit=1)[0]


def files() -> list[Path]:
    """The files that the pages are in."""
    return sorted([FOLDER / "page.md", *FOLDER.glob("*/page.md")])


@cache
def _pages() -> dict[str, str]:
    pages = [(title, f"## {title}\n{text}") for path in files() for title, text in _sections(path)]
    return dict(sorted(pages))


@cache
def _pages_of_laws() -> dict[str, str]:
    paths = FOLDER.glob("*/laws.md")
    named = [(f"law.{path.parent.name}.{title}", text) for path in paths for title, text in _sections(path)]
    return {code: f"## {code}\n{text}" for code, text in sorted(named)}


def _sections(path: Path) -> Iterator[tuple[str, str]]:
    """The title and the text of each ``##`` section of a file."""
    for section in re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = section.strip().partition("\n")
        yield title, text


def _nearest(code: str) -> str:
    """Codes of the same group, else codes that are written alike, else the groups."""
    group = f"{code.partition('.')[0]}."
    same = [each for each in codes() if each.startswith(group)]
    if same:
        return suggest(code, same)
    groups = sorted({f"{each.partition('.')[0]}." for each in codes()})
    return suggest(code, codes() if get_close_matches(code, codes()) else groups)
