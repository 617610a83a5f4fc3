"""Writes docs/reference/checks/, a page for each topic, from the docstrings of the checks."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from trainwright.doctor.check import Check
from trainwright.doctor.discovery import all_checks

FOLDER = Path(__file__).parent.parent / "docs/reference/checks"
HEAD = """# {title}

Written from the docstrings of the checks by `python scripts/checks.py`; `trainwright explain CODE` prints the same.
"""


def pages() -> dict[str, str]:
    """Returns the text of each file of the folder, by file name."""
    topics = {topic: list(some) for topic, some in groupby(all_checks(), key=lambda each: each.topic)}
    lines = ["| topic | checks |", "|---|---|"]
    lines += [f"| [{topic}]({topic}.md) | {_links(topic, some)} |" for topic, some in topics.items()]
    found = {"README.md": HEAD.format(title="Checks") + "\n" + "\n".join(lines) + "\n"}
    for topic, some in topics.items():
        text = "\n\n".join(each.page.markdown(each.code) for each in some)
        found[f"{topic}.md"] = f"{HEAD.format(title=f'Checks: {topic}')}\n{text}\n"
    return found


def _links(topic: str, checks: list[Check]) -> str:
    return ", ".join(f"[{name}]({topic}.md#{topic}{name})" for name in (each.code.partition(".")[2] for each in checks))


def main() -> None:
    """Writes all pages, and deletes pages of topics that no longer exist."""
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for file in FOLDER.glob("*.md"):
        if file.name not in texts:
            file.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
