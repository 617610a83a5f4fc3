"""Training, watching and the demo start on macOS and Windows: nothing that only Linux has is used without a check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.errors import UsageError
from trainwright.trials.trial import TrialProcess

pytestmark = pytest.mark.examined


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_fit_watch_and_demo_run(platform: str, tmp_path: Path) -> None:
    command = [sys.executable, "-X", "warn_default_encoding", "-m", "tests.other_system", platform, str(tmp_path)]
    environ = {name: value for name, value in os.environ.items() if name != "TRAINWRIGHT_EXAMINE"}
    environ |= {"PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, capture_output=True, encoding="cp1252", env=environ, check=False)
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed[-3000:]
    assert "cannot" not in printed and "not saved" not in printed, printed[-3000:]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()) == ["a", "demo"]


def test_trials_say_that_windows_has_no_signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UsageError, match="WSL"):
        TrialProcess(tmp_path / "recipe.yaml", (), tmp_path / "trial")
