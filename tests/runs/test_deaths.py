"""The crash-loop guard: two deaths in one step, seen in the log and the lock, and what is kept to look into them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainwright.errors import UsageError
from trainwright.runs.deaths import deaths_in, require_no_crash_loop, write_bundle
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.reader import read
from trainwright.runs.records import Ended, Record, Started, Step
from trainwright.runs.writer import LogWriter

AGAIN = "trainwright resume runs/x"


def again(paths: Sequence[str]) -> str:
    return " --accept ".join([AGAIN, *paths])


@contextmanager
def died(folder: RunFolder, *steps: int) -> Iterator[RunLock]:
    """The lock of a run whose last processes, 11 and on, died in these steps."""
    for pid, step in enumerate(steps, 11):
        lock = RunLock.acquire(folder.path)
        lock.beat(step)
        lock.release(clean=False)
        left = json.loads((folder.path / "lock").read_text())
        (folder.path / "lock").write_text(json.dumps({**left, "pid": pid}))
    lock = RunLock.acquire(folder.path)
    yield lock
    lock.release(clean=False)


def started(pid: int, *, died_in_step: int | None = None, step: int = 400) -> Started:
    return Started(time_s=1.7e9 + pid, step=step, version="0.1.0", pid=pid, died_in_step=died_in_step)


def step(number: int) -> Step:
    values: dict[str, Any] = dict.fromkeys(("time_s", "grad_norm", "lr", "weight", "step_s", "wait_s"), 0.5)
    counts: dict[str, Any] = dict.fromkeys(("samples", "tokens", "skipped", "mem_bytes"), 3)
    return Step(step=number, loss=float("nan"), ids_hash="a1", **values, **counts)


def ended(ending: str, reason: str, number: int) -> Ended:
    return Ended(
        time_s=1.7e9, ending=ending, reason=reason, step=number, loss=None, val_loss=None, skipped=0, seconds=9.0
    )


KILLED_TWICE = (started(11, step=0), step(410), started(12, died_in_step=417), step(415))
FAILED_AND_KILLED = (started(11), ended("failed", "RuntimeError: bad sample", 416), started(12, died_in_step=417))


def test_each_death_of_the_row_is_told_with_its_reason() -> None:
    earlier = (started(9, step=0), started(10, died_in_step=300))
    records = (*earlier, *FAILED_AND_KILLED[1:], started(13, died_in_step=417))
    deaths = deaths_in(records, 417, (10, 12, 13))
    assert [(death.pid, death.reason) for death in deaths] == [(10, "RuntimeError: bad sample"), (12, None), (13, None)]
    assert str(deaths[1]) == "process 12: killed (no end record) (last record 2023-11-14 22:13:32 UTC)"


FINISHED = (started(7, step=0), step(500), ended("finished", "", 500))


@pytest.mark.parametrize(
    ("records", "known"),
    [
        ((*FINISHED, started(11), started(12)), [11, 12]),
        ((*FINISHED, started(11)), [11]),
        (FINISHED, []),
        ((started(11), *FINISHED), []),  # another process 11 (each in a container of its own), and well-ended since
        ((started(11), ended("stopped", "SIGINT", 416)), []),
        ((started(11), step(418)), []),  # the log may be coarse, but it got past the step
        ((started(11), step(417)), [11]),  # killed by an observer after the log had its record
        ((started(11), started(13), started(12)), [11, 12]),  # 13 was asked to stop before it was killed
        ((started(11), started(11), started(12)), [11, 12]),
        ((), []),
    ],
)
def test_who_did_not_die_in_it_is_not_named(records: Sequence[Record], known: list[int]) -> None:
    assert [death.pid for death in deaths_in(records, 417, (11, 12))] == known


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that died in step 417 twice; it would go on from step 400."""
    folder = RunFolder.create(tmp_path, "x")
    folder.write_text("recipe.yaml", "name: x\n")
    folder.write_text("plan.json", "{}\n")
    write_checkpoint(folder.checkpoints / "step-00000400")
    write_log(folder, FAILED_AND_KILLED)
    return folder


def write_checkpoint(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights" * 1000)
    (path / "manifest.json").write_text("{}")


def write_log(folder: RunFolder, records: Sequence[Record]) -> None:
    log = LogWriter(folder.log)
    for record in records:
        log.write(record)
    log.close()


DEATHS = deaths_in(KILLED_TWICE, 417, (11, 12))


def test_a_bundle_keeps_what_retention_deletes(folder: RunFolder) -> None:
    (folder.path / "error.txt").write_text("RuntimeError: bad sample")
    checkpoint = folder.checkpoints / "step-00000400"
    inode = (checkpoint / "model.safetensors").stat().st_ino
    for _ in range(2):  # the second one takes the place of the first
        bundle = write_bundle(folder, 417, checkpoint, (*KILLED_TWICE, step(416)), DEATHS)
    shutil.rmtree(checkpoint)
    assert bundle == folder.bundles / "step-00000417"
    assert {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()} == {
        "bundle.json",
        "recipe.yaml",
        "plan.json",
        "error.txt",
        "checkpoint/model.safetensors",
        "checkpoint/manifest.json",
    }
    assert (bundle / "checkpoint/model.safetensors").read_bytes() == b"weights" * 1000
    assert (bundle / "checkpoint/model.safetensors").stat().st_ino == inode
    assert [path.name for path in folder.bundles.iterdir()] == ["step-00000417"]
    about = json.loads((bundle / "bundle.json").read_text())
    assert (about["step"], about["checkpoint"]) == (417, "step-00000400")
    assert [death["pid"] for death in about["deaths"]] == [11, 12]
    assert (about["last_step"]["step"], about["last_step"]["loss"]) == (416, "NaN")


def test_a_checkpoint_on_another_disk_is_copied(folder: RunFolder) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == folder.path.stat().st_dev:
        pytest.skip("no second file system here")
    with tempfile.TemporaryDirectory(dir=shm) as elsewhere:
        write_checkpoint(Path(elsewhere) / "step-00000500")
        bundle = write_bundle(folder, 501, Path(elsewhere) / "step-00000500", KILLED_TWICE, DEATHS)
    assert (bundle / "checkpoint/model.safetensors").read_bytes() == b"weights" * 1000


def test_a_third_start_is_refused_until_it_is_accepted(folder: RunFolder) -> None:
    checkpoint = folder.checkpoints / "step-00000400"
    with died(folder, 417, 417) as lock, pytest.raises(UsageError) as caught:
        require_no_crash_loop(folder, lock, checkpoint, (), again)
    said = caught.value.message
    assert said.startswith("the run died in step 417 twice in a row:\n  process 11: RuntimeError: bad sample")
    assert "process 12: killed (no end record)" in said
    assert str(folder.bundles / "step-00000417") in said
    assert "dmesg" in caught.value.remedy and f"`{AGAIN} --accept crash-loop`" in caught.value.remedy
    shutil.rmtree(folder.bundles)
    with died(folder) as lock:
        require_no_crash_loop(folder, lock, checkpoint, ("precision", "crash-loop"), again)
    assert not folder.bundles.exists()


@pytest.mark.parametrize(
    ("known", "unknown"), [((), "they"), ((11, 12), "the other one"), ((11,), "the others"), ((11, 12, 13), "")]
)
def test_of_those_that_died_while_they_started_only_their_number_is_known(
    folder: RunFolder, known: tuple[int, ...], unknown: str
) -> None:
    folder.log.unlink()
    write_log(folder, (*FINISHED, *map(started, known)))
    with died(folder, 417, 417, 417) as lock, pytest.raises(UsageError) as caught:
        require_no_crash_loop(folder, lock, None, (), again)
    head, *row, kept = caught.value.message.splitlines()
    assert head == "the run died in step 417 3 times in a row:"
    assert kept.endswith("has everything to run that step again")
    if unknown:
        assert row.pop() == f"  {unknown} died before anything was written to the log"
    assert [line.split(":")[0] for line in row] == [f"  process {pid}" for pid in known]


@pytest.mark.parametrize("steps", [(), (417,), (417, 418), (417, 417, 418), (417, 401, 417)])
def test_deaths_that_make_no_loop(folder: RunFolder, steps: tuple[int, ...]) -> None:
    with died(folder, *steps) as lock:
        require_no_crash_loop(folder, lock, None, (), again)
    assert not folder.bundles.exists()


def test_steps_before_it_do_not_make_it_forget_and_later_ones_do(folder: RunFolder) -> None:
    with died(folder, 417) as lock:
        for step in range(401, 418):
            lock.beat(step)
    with died(folder) as lock:
        assert (lock.died_in_step, lock.deaths) == (417, 2)
        for step in range(401, 419):
            lock.beat(step)
    with died(folder, 417) as lock:
        assert (lock.died_in_step, lock.deaths) == (417, 1)


def test_a_start_that_dies_before_its_first_step_forgets_nothing(folder: RunFolder) -> None:
    with died(folder, 417, 417):
        pass
    with died(folder) as lock:
        assert (lock.died_in_step, lock.deaths) == (417, 2)


def test_the_refusal_points_to_the_error(folder: RunFolder) -> None:
    (folder.path / "error.txt").write_text("RuntimeError: bad sample")
    write_log(folder, [ended("failed", "RuntimeError: bad sample", 416)])
    with died(folder, 417, 417) as lock, pytest.raises(UsageError) as caught:
        require_no_crash_loop(folder, lock, None, (), again)
    assert str(folder.bundles / "step-00000417/error.txt") in caught.value.remedy
    assert json.loads((folder.bundles / "step-00000417/bundle.json").read_text())["checkpoint"] is None


def test_a_bundle_that_cannot_be_written_is_no_reason_to_start(folder: RunFolder) -> None:
    folder.bundles.write_text("a file where the folder should be")
    said = r"no bundle was written to run that step again: cannot write .*/step-00000417"
    with died(folder, 417, 417) as lock, pytest.raises(UsageError, match=said):
        require_no_crash_loop(folder, lock, folder.checkpoints / "step-00000400", (), again)


def test_a_log_that_is_gone_leaves_the_guard(folder: RunFolder) -> None:
    folder.log.unlink()
    with died(folder, 417, 417, 417) as lock, pytest.raises(UsageError, match="step 417 3 times in a row"):
        require_no_crash_loop(folder, lock, None, (), again)


def test_what_was_accepted_is_in_the_log(folder: RunFolder) -> None:
    taken_up = replace(started(13, died_in_step=417), accepted=("crash-loop",))
    write_log(folder, [taken_up])
    assert read(folder.log).records[-1] == taken_up


DIE = """
import os, signal, sys, time
from pathlib import Path
from trainwright.errors import UsageError
from trainwright.runs.deaths import require_no_crash_loop
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import RunLock
from trainwright.runs.records import Started
from trainwright.runs.writer import LogWriter
folder, accepted = RunFolder.open(sys.argv[1]), tuple(sys.argv[3:])
lock = RunLock.acquire(folder.path)
try:
    require_no_crash_loop(folder, lock, None, accepted, " --accept ".join)
except UsageError:
    lock.release(clean=False)
    sys.exit(2)
died = lock.died_in_step
LogWriter(folder.log).write(Started(time_s=time.time(), step=0, version="", pid=os.getpid(), died_in_step=died))
lock.beat(int(sys.argv[2]) - 8)
lock.beat(int(sys.argv[2]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_processes_that_die_until_one_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "x")
    folder.write_text("recipe.yaml", "name: x\n")
    folder.write_text("plan.json", "{}")

    def start(in_step: int, *accept: str) -> int:
        return subprocess.run(
            [sys.executable, "-c", DIE, str(folder.path), str(in_step), *accept], check=False
        ).returncode

    killed, refused = -9, 2
    assert [start(15), start(17), start(17)] == [killed, killed, killed]
    assert [start(17), start(17), start(18)] == [refused, refused, refused]
    accepted = [start(17, "crash-loop"), start(17), start(19, "crash-loop"), start(17)]
    assert accepted == [killed, refused, killed, killed]
    assert [path.name for path in folder.bundles.iterdir()] == ["step-00000017"]
    about = json.loads((folder.bundles / "step-00000017/bundle.json").read_text())
    assert len(about["deaths"]) == 3 and about["last_step"] is None
