"""Working directories: each test runs in a folder of its own, so that it leaves no run elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.training.processes import RECIPE, SLOWLY


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ``slow.yaml`` and the module of its dataset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("slowly", None)
    (tmp_path / "slowly.py").write_text(SLOWLY)
    (tmp_path / "slow.yaml").write_text(RECIPE.replace("WORKERS", "0"))
    return tmp_path
