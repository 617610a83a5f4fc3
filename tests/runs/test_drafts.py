"""Drafts of processes that are gone are removed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainwright.runs.storage import draft_of, remove_leftovers


def draft_by(pid: int, folder: Path, *, name: str = "plan.json", place: str | None = None) -> Path:
    """The path of a draft of another process, by default of this machine."""
    mine = draft_of(folder / name).name.rpartition(".draft")[0]
    return folder / f".{name}.{pid}-{place or mine.rpartition('-')[2]}.draft"


@pytest.fixture(scope="module")
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_those_of_processes_that_are_gone(tmp_path: Path, gone: int) -> None:
    file, whole = draft_by(gone, tmp_path), draft_by(gone, tmp_path, name="model")
    file.write_text("{")
    whole.mkdir()
    (whole / "model.safetensors").write_bytes(b"0" * 100)
    kept = [draft_of(tmp_path / "plan.json"), draft_by(os.getppid(), tmp_path), tmp_path / f".plan.json.{gone}.draft"]
    kept += [tmp_path / "plan.json", tmp_path / ".notes.draft", draft_by(gone, tmp_path / "checkpoints")]
    (tmp_path / "checkpoints").mkdir()
    for path in kept:
        path.write_text("{}")
    remove_leftovers(tmp_path)
    assert not file.exists() and not whole.exists()
    assert all(path.exists() for path in kept)
    remove_leftovers(tmp_path / "nowhere")


def test_those_of_another_machine_when_they_are_old(tmp_path: Path, gone: int) -> None:
    """It is unknown if their process is alive, but a process that writes touches its files."""
    written, old = draft_by(gone, tmp_path, place="0" * 8), draft_by(gone, tmp_path, place="1" * 8)
    for path in (written, old):
        path.mkdir()
        (path / "model.safetensors").touch()
        os.utime(path, (0, 0))
    day_before_yesterday_s = time.time() - 2 * 24 * 3600
    os.utime(old / "model.safetensors", (day_before_yesterday_s, day_before_yesterday_s))
    remove_leftovers(tmp_path)
    assert written.exists() and not old.exists()


def test_a_link_is_removed_and_not_followed(tmp_path: Path, gone: int) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").touch()
    (tmp_path / "run").mkdir()
    link = draft_by(gone, tmp_path / "run")
    link.symlink_to(outside)
    remove_leftovers(tmp_path / "run")
    assert not link.is_symlink() and (outside / "mine").exists()
