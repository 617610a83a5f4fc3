"""The folder that runs are started in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.training.processes import RECIPE, SLOWLY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ``slow.yaml`` and the module of its dataset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("slowly", None)
    (tmp_path / "slowly.py").write_text(SLOWLY)
    (tmp_path / "slow.yaml").write_text(RECIPE.replace("WORKERS", "0"))
    return tmp_path
