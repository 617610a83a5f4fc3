"""The pages of ``trainwright explain CODE``: what a finding means, its look-alikes, its remedies, where it was seen.

They lie in the ``page.md`` of a family, or in ``pages/<group>.md``, one ``## code`` each. Nothing is imported to read
them.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from trainwright.errors import UsageError, suggest

FOLDER = Path(__file__).parent / "pages"
SECTIONS = ("What", "Why it matters", "Look-alikes", "Remedies", "Sources")
"""In the order of a page; ``Sources`` is left out where there is none to name."""


def codes() -> tuple[str, ...]:
    """Every code that has a page, sorted."""
    return tuple(_pages())


def page(code: str) -> str:
    """The page of a code; for a group such as ``num.``, its codes with their titles; for "" all codes.

    Raises UsageError for a code that has no page, with the nearest ones that have.
    """
    if code in _pages():
        return _pages()[code]
    group = [each for each in codes() if not code or each.startswith(f"{code.removesuffix('.')}.")]
    if not group:
        raise UsageError(f"there is no page for {code!r}", remedy=_nearest(code))
    width = max(map(len, group))
    return "\n".join(f"{each:{width}}  {title(each)}" for each in group)


def title(code: str) -> str:
    """What the code means, in one line: the first sentence of its page."""
    if code not in _pages():
        raise UsageError(f"there is no page for {code!r}", remedy=_nearest(code))
    words = " ".join(_pages()[code].split())
    return re.split(r"(?<=\.) ", words.partition("**What.** ")[2], maxsplit=1)[0]


def files() -> list[Path]:
    """The files that the pages are in."""
    return sorted([*FOLDER.glob("*.md"), *FOLDER.parent.glob("*/page.md")])


@cache
def _pages() -> dict[str, str]:
    texts = [path.read_text(encoding="utf-8") for path in files()]
    pages = [f"## {each.strip()}" for text in texts for each in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    return dict(sorted((each.splitlines()[0].removeprefix("## "), each) for each in pages))


def _nearest(code: str) -> str:
    """Codes of the same group, else codes that are written alike, else the groups."""
    group = f"{code.partition('.')[0]}."
    same = [each for each in codes() if each.startswith(group)]
    if same:
        return suggest(code, same)
    groups = sorted({f"{each.partition('.')[0]}." for each in codes()})
    return suggest(code, codes() if get_close_matches(code, codes(), cutoff=0.5) else groups)
