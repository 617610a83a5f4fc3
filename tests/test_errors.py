"""Remedies of errors: names that are suggested for a missing file."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.errors import suggest_file


@pytest.mark.parametrize(
    ("missing", "suggested"),
    [
        ("nothere.jsonl", None),
        ("chat.jsonl", "chats.jsonl"),
        ("chats.json", "chats.jsonl"),
        ("h1.jsonl", "h11.jsonl"),
        ("bse", "base"),
    ],
)
def test_only_similar_names_are_suggested(tmp_path: Path, missing: str, suggested: str | None) -> None:
    for name in ("h11.jsonl", "chats.jsonl", "base"):
        (tmp_path / name).touch()
    remedy = suggest_file(tmp_path / missing, "the data")
    expected = f"give the path of the data; relative ones start at {Path.cwd()}"
    assert remedy == (f"did you mean {tmp_path / suggested}?" if suggested else expected)
