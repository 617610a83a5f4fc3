#!/usr/bin/env python3
"""Prints docs/llms.txt: the pages of the documentation as a list for language models (llmstxt.org).

.venv/bin/python scripts/llms.py > docs/llms.txt
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
MAX_CHARS = 160


class SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml without mkdocs: tags that name a Python function become None."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)  # type: ignore[no-untyped-call]


def pages(entries: list[Any], above: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield section, title and path of each page in the navigation."""
    for entry in entries:
        for title, inside in entry.items() if isinstance(entry, dict) else [("", entry)]:
            if isinstance(inside, str):
                yield above, title, inside
            else:
                yield from pages(inside, f"{above}: {title}".removeprefix(": "))


def first_sentence(path: str) -> str:
    """Return the first sentence of the prose of a page."""
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / path).read_text("utf-8"), flags=re.DOTALL)
    prose = [part for part in re.split(r"\n\s*\n", text) if re.match(r"[A-Za-z`*\[]", part.strip())]
    line = " ".join(prose[0].split()) if prose else ""
    line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
    sentence = re.split(r"(?<=[.:])\s", line, maxsplit=1)[0]
    return sentence if len(sentence) <= MAX_CHARS else f"{sentence[: MAX_CHARS - 3].rsplit(' ', 1)[0]}..."


def text() -> str:
    site = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), SiteLoader)
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}"]
    lines += ["", "For coding agents: `trainwright mcp` serves runs; `trainwright agent install` writes a skill."]
    section = None
    for above, title, path in pages(site["nav"]):
        if path == "index.md" or path.startswith("reference/checks/"):
            continue
        if above != section:
            lines += ["", f"## {above}", ""]
            section = above
        lines.append(f"- [{title}]({path.removesuffix('.md')}.html): {first_sentence(path)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
