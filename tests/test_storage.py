"""What can happen to a run folder while a process trains in it: real processes, real disks, real users."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_runs import folder, invoke, start, wait_for_step
from trainwright.runlog.reader import read
from trainwright.runlog.records import Started
from trainwright.state.store import checkpoints, newest_valid

__all__ = ["folder"]
pytestmark = pytest.mark.slow

LONG = ["--set", "until=5000steps", "--set", "checkpoint.every=5steps"]


def test_a_second_process_is_refused_with_the_pid_of_the_first(folder: Path) -> None:
    first = start("train", "slow.yaml", *LONG, cwd=folder)
    wait_for_step(folder / "runs/slow/log.jsonl", 10)
    second = start("resume", "runs/slow", cwd=folder)
    said, _ = second.communicate(timeout=120)
    assert second.returncode == 2 and f"process {first.pid}" in said and "remedy" in said and "Traceback" not in said
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    log = read(folder / "runs/slow/log.jsonl")
    assert len([r for r in log.records if isinstance(r, Started)]) == 1, "the second wrote nothing"
    newest, broken = newest_valid(folder / "runs/slow/checkpoints")
    assert newest is not None and not broken
    code, said = invoke("resume", "runs/slow", "--set", f"until={int(newest.name[5:]) + 5}steps", "--accept", "until")
    assert code == 0, said


def test_a_folder_deleted_while_training_is_written_anew(folder: Path) -> None:
    running = start("train", "slow.yaml", *LONG, cwd=folder)
    wait_for_step(folder / "runs/slow/log.jsonl", 10)
    shutil.rmtree(folder / "runs")
    while not list(folder.glob("runs/slow/checkpoints/step-*")):
        assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 75 and "was deleted while training" in said and "Traceback" not in said
    newest, broken = newest_valid(folder / "runs/slow/checkpoints")
    assert newest is not None and not broken
    until = f"until={int(newest.name[5:]) + 5}steps"
    code, said = invoke("resume", "runs/slow", "--set", until, "--accept", "until")
    assert code == 0 and f"resumed from {Path('runs/slow/checkpoints') / newest.name}" in said, said


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    at = tmp_path / "disk"
    at.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(at)], capture_output=True).returncode:
        pytest.skip("mounting a disk needs root")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_disk_that_becomes_read_only(folder: Path, disk: Path) -> None:
    running = start("train", "slow.yaml", *LONG, "--set", f"folder={disk}", cwd=folder)
    wait_for_step(disk / "slow/log.jsonl", 12)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    committed = checkpoints(disk / "slow/checkpoints")
    assert committed
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 1 and "Traceback" not in said
    assert "is not saved" in said and "Read-only" in said and "could not be saved" in said
    assert newest_valid(disk / "slow/checkpoints")[0] is not None
    code, said = invoke("resume", str(disk / "slow"))
    assert code == 1 and "read-only" in said.lower() and "remedy" in said


def as_nobody(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Root may do everything, so permissions are tried as somebody else."""
    command = [sys.executable, "-m", "trainwright", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(cwd)}
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, user="nobody")
    except PermissionError:
        pytest.skip("becoming another user needs root")
    return done.returncode, done.stdout + done.stderr


def test_a_folder_of_somebody_else(folder: Path) -> None:
    for path in (folder, *folder.parents):
        if not path.stat().st_mode & 0o005 == 0o005:
            path.chmod(path.stat().st_mode | 0o005)
        if path.name.startswith("pytest-"):
            break
    assert invoke("train", "slow.yaml", "--set", "until=10steps")[0] == 0
    before = sorted(path for path in (folder / "runs").rglob("*"))
    code, said = as_nobody("resume", "runs/slow", "--set", "until=20steps", cwd=folder)
    assert code == 1 and "permission denied" in said and "remedy" in said and "Traceback" not in said, said
    code, said = as_nobody("train", "slow.yaml", cwd=folder)
    assert code == 1 and "permission denied" in said and "remedy" in said and "Traceback" not in said, said
    assert sorted(path for path in (folder / "runs").rglob("*")) == before


DIES = """\
import os, signal
from slowly import Slow

class Dies(Slow):
    def __getitem__(self, index):
        if index == 50 and not os.path.exists("mended"):
            HOW
        return super().__getitem__(index)
"""


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('torn image')"])
def test_a_crash_loop_is_ended(folder: Path, how: str) -> None:
    (folder / "dies.py").write_text(DIES.replace("HOW", how))
    options = ["--set", "data.train.use=dies:Dies", "--set", "checkpoint.every=2steps", "--set", "data.shuffle=false"]
    for command in (["train", "slow.yaml", *options], ["resume", "runs/slow"]):
        died = start(*command, cwd=folder)
        said, _ = died.communicate(timeout=120)
        assert died.returncode in (1, -9), said
    code, said = invoke("resume", "runs/slow")
    assert code == 2 and "died in step 7 twice" in said and "--accept crash-loop" in said, said
    bundle = folder / "runs/slow/bundles/step-00000007"
    assert str(bundle.relative_to(folder)) in said
    assert newest_valid(bundle / "checkpoint")[0] or (bundle / "checkpoint/manifest.json").exists()
    assert json.loads((bundle / "bundle.json").read_text())["step"] == 7
    (folder / "mended").touch()
    code, said = invoke("resume", "runs/slow", "--accept", "crash-loop")
    assert code == 0, said
