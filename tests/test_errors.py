"""Remedies of errors: names that are suggested for a missing file; and the imports of optional packages."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path

import pytest

from trainwright.errors import import_optional, suggest_file


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


NOISY = """
import gc, logging
logging.getLogger("torchao.kernels").warning("kernels for another machine")
logging.getLogger("of_the_user").warning("a warning of the user")
collects = gc.isenabled()
"""


def test_an_optional_import_silences_torchao_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "noisy_package.py").write_text(NOISY)
    monkeypatch.syspath_prepend(tmp_path)
    module = import_optional("noisy_package", needed_for="this test")
    monkeypatch.delitem(sys.modules, "noisy_package")
    assert caplog.messages == ["a warning of the user"]
    assert not module.collects and gc.isenabled()
    logging.getLogger("torchao.kernels").warning("of a later call")
    assert caplog.messages[-1] == "of a later call"
