"""Hook of mkdocs: links from a page to a file outside of docs/ lead to that file in the repository."""

from __future__ import annotations

import os
import re
from typing import Any

LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Returns the text of a page with the links that leave docs/ made absolute."""
    folder = os.path.dirname(page.file.src_uri)  # noqa: PTH120  a path of the site, not of this machine

    def absolute(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join("docs", folder, found[1]))  # noqa: PTH118
        if target.startswith("docs/"):
            return found[0]
        return f"]({config.extra['repository']}/blob/main/{target}{found[2] or ''})"

    return LINK.sub(absolute, markdown)
