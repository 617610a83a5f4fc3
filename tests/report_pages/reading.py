"""Parses a generated page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """The elements of a page as (tag, attributes), and the text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, Mapping[str, str | None]]] = []
        self.text, self.data, self._inside = "", "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = f"{tag} {dict(attrs).get('id', '')}"

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script data":
            self.data += data
        elif not self._inside.startswith(("script", "style")):
            self.text += f" {data}"


def curves_of(page: Page) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(page.data)["runs"]
    return runs
