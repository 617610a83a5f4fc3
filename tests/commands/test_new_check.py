"""``checks new``: the files of a check that can be filled in."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.commands.new_check import new_check
from trainwright.errors import UsageError


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "trainwright" / "doctor").mkdir(parents=True)
    return tmp_path


def test_both_files_lie_where_such_files_lie(checkout: Path) -> None:
    code = "optim.lost"
    made = new_check(code, checkout)
    assert made.check == checkout / "trainwright/doctor/checks/optim/lost.py"
    assert made.test == checkout / "tests/doctor/checks/optim/test_lost.py"
    for path in (made.check, made.test):
        text = path.read_text()
        compile(text, str(path), "exec")
        assert max(map(len, text.splitlines())) <= 120
    assert "def lost(run: RunContext, facts: " in made.check.read_text() and f'"{code}"' in made.test.read_text()


@pytest.mark.parametrize("code", ["optim.Lost", "optim", "qqq.lost", "optim.lr_too_high"])
def test_what_is_no_new_code_is_refused(checkout: Path, code: str) -> None:
    root = Path(__file__).parents[2] if code == "optim.lr_too_high" else checkout
    with pytest.raises(UsageError):
        new_check(code, root)
