"""Every link of the pages leads to a file that is there, and every anchor to a heading of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "trainwright").rglob("*.md")),
]
LINK = re.compile(r"!?\[[^\]\n]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
ABSOLUTE = re.compile(
    r"https://(?:github\.com/trainwright/trainwright/blob|raw\.githubusercontent\.com/trainwright/trainwright)/main/"
)
"""Links of README.md, which the package index shows, to files of the repository."""
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def without_code(text: str) -> str:
    return CODE.sub("", text)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page, and those that it sets by itself."""
    text = page.read_text()
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in HEADING.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        number = next(n for n in range(1000) if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


def dead_links(page: Path) -> Iterator[str]:
    """The links of a page within the repository that lead nowhere."""
    for target in LINK.findall(without_code(page.read_text())):
        path, _, anchor = ABSOLUTE.sub(f"{ROOT}/", target).partition("#")
        if re.match(r"[a-z][a-z+.-]*:", path):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{target}: there is no {path}"
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            yield f"{target}: {file.name} has no heading of that name"


def test_every_link_leads_somewhere() -> None:
    found = {str(page.relative_to(ROOT)): list(dead_links(page)) for page in PAGES}
    assert {page: dead for page, dead in found.items() if dead} == {}


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `code` heading, twice\n# One code heading, twice\n"
        "[a](#one-code-heading-twice-1) [b](none.md) [c](page.md#no)"
        " [d](https://example.org/none#x) `[e](none.md)` ![f](none.png)\n"
    )
    found = [line.split(":")[0] for line in dead_links(page)]
    assert found == ["none.md", "page.md#no", "none.png"]


def test_the_readme_has_only_links_that_work_on_the_package_index() -> None:
    assert [
        target for target in LINK.findall((ROOT / "README.md").read_text()) if not target.startswith("https://")
    ] == []
