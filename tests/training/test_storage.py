"""Faults of a run folder during training, with real processes, disks and users."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import trainwright as tw
from tests.disks import small_disk
from tests.forked import COMMAND_LINE, Forked
from tests.training.processes import invoke, start, wait_for_step
from trainwright.checkpoint.store import newest_valid
from trainwright.runs.reader import read
from trainwright.runs.records import Saved, Started

pytestmark = pytest.mark.slow

LONG = ["--set", "until=5000steps", "--set", "checkpoint.every=5steps"]


def test_a_second_process_is_refused_and_a_kill_of_the_first_loses_nothing_that_was_saved(folder: Path) -> None:
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
    assert int(newest.name[5:]) >= max(r.step for r in log.records if isinstance(r, Saved))
    code, said = invoke("resume", "runs/slow", "--set", f"until={int(newest.name[5:]) + 5}steps", "--accept", "until")
    assert code == 0 and f"resumed from {Path('runs/slow/checkpoints') / newest.name}" in said, said


def test_a_folder_deleted_while_training_is_written_anew(folder: Path) -> None:
    running = start("train", "slow.yaml", *LONG, cwd=folder)
    wait_for_step(folder / "runs/slow/log.jsonl", 10)
    (folder / "runs").rename(folder / "gone")  # at one instant: a write may be going on in it
    shutil.rmtree(folder / "gone")
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
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        yield disk


def test_a_disk_that_is_read_only(folder: Path, disk: Path) -> None:
    assert invoke("train", "slow.yaml", "--set", "until=10steps", "--set", f"folder={disk}")[0] == 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for command in (
        ["resume", str(disk / "slow"), "--set", "until=20steps"],
        ["train", str(disk / "slow/recipe.yaml")],
    ):
        code, said = invoke(*command)
        assert code == 1 and "read-only" in said and "remedy" in said and "Traceback" not in said, said
    assert newest_valid(disk / "slow/checkpoints")[0] is not None


POWERLESS = """
import ctypes, os

VERSION_3 = 0x20080522
OVER_PERMISSIONS = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
libc = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
sets[0] &= ~OVER_PERMISSIONS  # in effect, and permitted
sets[1] &= ~OVER_PERMISSIONS
assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
"""
"""Code that drops the capabilities of root over permissions, as setpriv does."""


def start_powerless(*arguments: str, cwd: Path) -> Forked:
    """As ``start``."""
    return Forked(POWERLESS + COMMAND_LINE, *arguments, cwd=cwd, together=True)


def test_a_folder_that_may_no_longer_be_written(folder: Path) -> None:
    running = start_powerless("train", "slow.yaml", *LONG, cwd=folder)
    saved = folder / "runs/slow/checkpoints"
    wait_for_step(folder / "runs/slow/log.jsonl", 12)
    saved.chmod(0o500)
    wait_for_step(folder / "runs/slow/log.jsonl", 100)  # what was saved last is not the step that it stops at
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=120)
    saved.chmod(0o700)
    assert running.returncode == 1 and "Traceback" not in said, said
    assert "is not saved" in said and "Permission denied" in said and "could not be saved" in said
    newest, broken = newest_valid(saved)
    assert newest is not None and not broken and f"trainwright resume {Path('runs/slow')}" in said


@pytest.mark.parametrize("command", ["resume runs/slow --set until=20steps", "train slow.yaml"])
def test_a_folder_that_may_not_be_written(folder: Path, command: str) -> None:
    assert invoke("train", "slow.yaml", "--set", "until=10steps")[0] == 0
    before = sorted((folder / "runs").rglob("*"))
    (folder / "runs").chmod(0o500)
    (folder / "runs/slow").chmod(0o500)
    (folder / "runs/slow/lock").chmod(0o400)
    running = start_powerless(*command.split(), cwd=folder)
    said, _ = running.communicate(timeout=120)
    (folder / "runs").chmod(0o700)
    (folder / "runs/slow").chmod(0o700)
    assert running.returncode == 1 and "permission denied" in said and "remedy" in said and "Traceback" not in said
    assert sorted((folder / "runs").rglob("*")) == before


DIES = """\
import os, signal
from slowly import Slow

class Dies(Slow):
    def __len__(self):
        return 300  # so many that its fingerprint reads only some of them

    def __getitem__(self, index):
        if index == 50 and not os.path.exists("mended"):
            HOW
        return super().__getitem__(index)
"""


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("how", "every", "times"),
    [
        ("raise ValueError('torn image')", 2, 2),
        (KILL, 2, 4),  # all but the first have only just started
    ],
)
def test_a_crash_loop_is_ended(folder: Path, how: str, every: int, times: int) -> None:
    (folder / "dies.py").write_text(DIES.replace("HOW", how))
    settings = ["data.train.use=dies:Dies", f"checkpoint.every={every}steps", "data.shuffle=false", "until=12steps"]
    settings.append("checkpoint.asynchronous=false")  # or the kill would come before the save
    options = [option for each in settings for option in ("--set", each)]
    for command in (["train", "slow.yaml", *options], *[["resume", "runs/slow"]] * (times - 1)):
        died = start(*command, cwd=folder)
        said, _ = died.communicate(timeout=120)
        assert died.returncode in (1, -9), said
    refused = start("resume", "runs/slow", cwd=folder)
    said, _ = refused.communicate(timeout=120)
    died_in = f"died in step 7 {'twice' if times == 2 else '4 times'}"
    assert refused.returncode == 2 and died_in in said and "--accept crash-loop" in said, said
    bundle = folder / "runs/slow/bundles/step-00000007"
    assert str(bundle.relative_to(folder)) in said
    assert newest_valid(bundle / "checkpoint")[0] or (bundle / "checkpoint/manifest.json").exists()
    assert json.loads((bundle / "bundle.json").read_text())["step"] == 7
    (folder / "mended").touch()
    mended = start("resume", "runs/slow", "--accept", "crash-loop", cwd=folder)
    said, _ = mended.communicate(timeout=120)
    assert mended.returncode == 0, said


SLOW_DISK = """\
import os
import threading
import time
from contextlib import suppress

from torch import nn

fsync = os.fsync

def slow_fsync(fd):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(60)  # far longer than two signals take
    fsync(fd)

os.fsync = slow_fsync

def model():
    return nn.Sequential(nn.Linear(12, 3))
"""


def test_interrupted_twice_it_does_not_wait_for_a_write(folder: Path) -> None:
    (folder / "disk.py").write_text(SLOW_DISK)
    settings = ["model={use: 'disk:model'}", "until=5000steps", "checkpoint.every=2steps", "log.doctor=false"]
    running = start("train", "slow.yaml", *(o for each in settings for o in ("--set", each)), cwd=folder)
    checkpoints = folder / "runs/slow/checkpoints"
    while not list(checkpoints.glob(".step-*")):  # a write is in flight
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    while "a second signal quits at once" not in running.stdout:  # two at the same instant may be delivered as one
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=50)
    assert running.returncode == 130 and "Traceback" not in said, said
    assert list(checkpoints.glob(".step-*")), "it waited for the write"
    assert newest_valid(checkpoints) == (None, [])


def test_a_storm_of_signals_leaves_a_run_to_go_on_with(folder: Path) -> None:
    running = start("train", "slow.yaml", "--set", "until=5000steps", "--set", "checkpoint.every=3steps", cwd=folder)
    wait_for_step(folder / "runs/slow/log.jsonl", 10)
    for number in range(200):
        if running.poll() is None:
            running.send_signal((signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)[number % 3])
    said, _ = running.communicate(timeout=120)
    assert running.returncode in (75, 130) and "Traceback" not in said, said
    newest, broken = newest_valid(folder / "runs/slow/checkpoints")
    assert newest is not None and not broken


def test_signals_after_the_end_of_a_saved_run_do_not_change_its_exit_code(folder: Path) -> None:
    running = start("train", "slow.yaml", "--set", "until=5000steps", cwd=folder)
    wait_for_step(folder / "runs/slow/log.jsonl", 3)
    running.send_signal(signal.SIGTERM)
    while "next     trainwright resume" not in running.stdout and running.poll() is None:
        time.sleep(0.001)
    with suppress(ProcessLookupError):
        while running.poll() is None:
            running.send_signal(signal.SIGUSR1)
    said, _ = running.communicate(timeout=50)
    assert running.returncode == 75, said


def test_an_error_in_a_callback_costs_no_step(folder: Path) -> None:
    class Callback:
        def observe(self, result: tw.StepResult, state: tw.TrainState) -> None:
            if result.step == 7:
                raise ZeroDivisionError("in my own callback")

        def close(self) -> None: ...

    data = (torch.randn(64, 4), torch.randint(0, 2, (64,)))

    def fit(**more: object) -> tw.Result:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        return tw.fit(model, data, torch.nn.CrossEntropyLoss(), until="12steps", quiet=True, **more)  # type: ignore[arg-type]

    with pytest.raises(ZeroDivisionError) as caught:
        fit(observers=[Callback()])
    assert "saved as runs/run/checkpoints/step-00000007" in caught.value.__notes__[0]
    assert "tw.fit(..., resume='runs/run')" in caught.value.__notes__[0]
    assert fit(resume="runs/run").step == 12
    steps = [r.step for r in read(folder / "runs/run/log.jsonl").records if isinstance(r, Started)]
    assert steps == [0, 7]


def test_a_resume_writes_through_no_link(folder: Path) -> None:
    """Neither to a log elsewhere, which ends it, nor to what is replaced as a whole."""
    assert invoke("train", "slow.yaml", "--set", "until=10steps")[0] == 0
    run, elsewhere = folder / "runs/slow", folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("log.jsonl", "plan.json", "recipe.yaml"):
        (run / name).rename(elsewhere / name)
        (run / name).symlink_to(elsewhere / name)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    code, said = invoke("resume", "runs/slow", "--set", "until=20steps")
    assert code == 1 and "log.jsonl: it is a symbolic link" in " ".join(said.split()) and "Traceback" not in said
    (run / "log.jsonl").unlink()
    code, said = invoke("resume", "runs/slow", "--set", "until=20steps")
    assert code == 0, said
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
