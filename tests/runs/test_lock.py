"""One process trains in a run folder: real processes, real kills, real disks."""

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

from tests.disks import small_disk
from trainwright.errors import StorageError, UsageError
from trainwright.runs.lock import RunLock

pytestmark = pytest.mark.process

HOLD = """
import os, subprocess, sys
from pathlib import Path
from trainwright.runs.lock import RunLock
lock = RunLock.acquire(Path(sys.argv[1]))
lock.beat(417)
subprocess.run(["true"], check=True)  # a process that is started closes what it inherits
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    signal_of_the_end = os.read(0, 1)
    os._exit(0)
os.waitpid(child, 0)
lock.release(clean=True)
"""


class Holding:
    """A process that holds the lock of ``run`` in step 417 and has a forked child; both end with its stdin."""

    def __init__(self, run: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        self.child = int(self.process.stdout.readline())
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def end(self) -> None:
        self.stdin.close()
        self.stdout.read()  # until the child has ended too
        self.stdout.close()
        self.process.wait()


def content(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "lock").read_text()))


TRY = """
import sys
from pathlib import Path
from trainwright.runs.lock import RunLock
try:
    RunLock.acquire(Path(sys.argv[1])).release(clean=False)
except Exception as error:
    print(error)
"""


def try_elsewhere(run: Path) -> str:
    """Return the error of another process that requests the lock; empty if it gets it."""
    return subprocess.run([sys.executable, "-c", TRY, str(run)], capture_output=True, text=True, check=True).stdout


def test_a_second_process_is_told_who_holds_it(tmp_path: Path) -> None:
    first = Holding(tmp_path)
    with pytest.raises(UsageError) as caught:
        RunLock.acquire(tmp_path)
    first.end()
    said = caught.value.message
    assert f"{tmp_path} is being trained by process {first.process.pid} " in said and "now in step 417" in said
    assert f"kill -INT {first.process.pid} saves" in caught.value.remedy
    lock = RunLock.acquire(tmp_path)
    assert lock.exclusive and lock.died_in_step is None
    lock.release(clean=True)


def test_a_kill_frees_it_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    first = Holding(tmp_path)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    os.kill(first.child, 0)  # it is there, and had inherited the descriptor
    assert content(tmp_path)["pid"] == first.process.pid and content(tmp_path)["step"] == 417
    lock = RunLock.acquire(tmp_path)
    assert lock.died_in_step == 417
    assert try_elsewhere(tmp_path).startswith(f"{tmp_path} is being trained by process {os.getpid()} ")
    lock.release(clean=True)
    first.end()


def test_who_holds_it_may_read_the_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lock = RunLock.acquire(run)
    shutil.copytree(run, tmp_path / "copy")  # opens and closes the file, as a tracker does that uploads the folder
    assert "is being trained by" in try_elsewhere(run)
    assert try_elsewhere(tmp_path / "copy") == ""
    lock.release(clean=True)
    assert try_elsewhere(run) == ""


CHILD = """
import os, sys
from pathlib import Path
from trainwright.runs.lock import RunLock
lock = RunLock.acquire(Path(sys.argv[1]))
lock.beat(417)
child = os.fork()
if child == 0:
    lock.beat(999)
    lock.excuse()
    lock.release(clean=True)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], sys.argv[1]])
os.waitpid(child, 0)
lock.release(clean=False)
"""


def test_a_forked_child_can_do_nothing_to_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), TRY]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "is being trained by" in said and "now in step 417" in said
    assert (content(tmp_path)["step"], content(tmp_path)["excused"]) == (417, False)


def die(run: Path, *steps: int, asked_to_stop: bool = False) -> int:
    """Fork a process that is killed in the last of these steps, perhaps after it was asked to stop. Return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            lock = RunLock.acquire(run)
            for step in steps[:-1]:
                lock.beat(step)
            if asked_to_stop:
                lock.excuse()
            lock.beat(steps[-1])
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    return pid


def left_in(run: Path) -> tuple[int | None, tuple[int, ...]]:
    """The row of deaths that the next process finds; it leaves all as it was."""
    lock = RunLock.acquire(run)
    lock.release(clean=False)
    assert lock.deaths == len(lock.dead)
    return lock.died_in_step, lock.dead


def test_a_death_after_a_signal_is_none_of_the_step(tmp_path: Path) -> None:
    for _ in range(2):  # a scheduler that kills when its patience is over, as long as a step or a start takes
        die(tmp_path, 416, 417, asked_to_stop=True)
    assert content(tmp_path)["excused"] is True and content(tmp_path)["step"] == 417
    assert left_in(tmp_path) == (None, ())
    assert content(tmp_path)["excused"] is False, "the excuse is of the process that was asked"
    first = die(tmp_path, 416, 417)
    die(tmp_path, 416, 417, asked_to_stop=True)
    assert left_in(tmp_path) == (417, (first,)), "it neither counts nor lets the others be forgotten"
    second = die(tmp_path, 416, 417)
    assert left_in(tmp_path) == (417, (first, second))
    die(tmp_path, 418, 419, asked_to_stop=True)
    assert left_in(tmp_path) == (None, ()), "it had got past the step"


def is_loop(run: Path, *deaths: tuple[int, ...]) -> bool:
    """Return True if the next process reports a crash loop after processes were killed in these steps."""
    for steps in deaths:
        die(run, *steps)
    lock = RunLock.acquire(run)
    lock.release(clean=False)
    return lock.is_loop


@pytest.mark.parametrize(
    ("deaths", "expected"),
    [
        ([(401, 417)], False),
        ([(401, 417), (401, 417)], True),  # after other steps, twice in the same one
        ([(401, 417), (417, 417)], False),  # the second one had only just started, as far as it is known
        ([(401, 417), (410, 417)], False),
        ([(401, 417), (409, 417)], True),
        ([(417,), (401, 417)], True),
        ([(401, 417), (401, 409), (401, 417)], False),
        ([(417,), (417,), (417,)], False),  # preempted three times while it started
        ([(417,), (417,), (417,), (417,)], True),
        ([(417,), (417,), (417, 418), (418,)], False),
    ],
)
def test_which_kills_are_no_chance(tmp_path: Path, deaths: list[tuple[int, ...]], expected: bool) -> None:
    assert is_loop(tmp_path, *deaths) is expected


def test_an_error_while_it_starts_is_no_kill(tmp_path: Path) -> None:
    for expected in (False, True):
        lock = RunLock.acquire(tmp_path)
        lock.beat(417)
        lock.release(clean=False)
        lock = RunLock.acquire(tmp_path)
        assert lock.is_loop is expected
        lock.release(clean=False)
    assert is_loop(tmp_path, (418,)) is False


def test_an_end_that_lies_with_no_step(tmp_path: Path) -> None:
    first = die(tmp_path, 416, 417)
    for _ in range(2):
        lock = RunLock.acquire(tmp_path)
        lock.beat(417)
        lock.forget_step()  # as for a full disk
        lock.release(clean=False)
        assert left_in(tmp_path) == (417, (first,))
    lock = RunLock.acquire(tmp_path)
    lock.beat(417)
    lock.beat(418)
    lock.forget_step()
    lock.release(clean=False)
    assert left_in(tmp_path) == (None, ())


def test_a_long_row_keeps_the_last_of_it(tmp_path: Path) -> None:
    row = tuple(die(tmp_path, 2**40 - 1, 2**40) for _ in range(3))
    assert left_in(tmp_path) == (2**40, row)
    head = json.dumps({**content(tmp_path), "pid": 2**22, "step": 2**40, "dead": [2**22] * 8})
    for _ in range(2):
        (tmp_path / "lock").write_text(head)
        assert left_in(tmp_path) == (2**40, (2**22,) * 8)
    assert (tmp_path / "lock").stat().st_size == 512


def test_between_beats_only_the_step_is_written_and_the_line_is_whole(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    for step in (1, 2, 9, 10, 10**15):
        lock.beat(step)
        assert (tmp_path / "lock").stat().st_size == 512
        assert content(tmp_path)["step"] == step and content(tmp_path)["starting"] is (step < 9)
    lock.excuse()
    lock.beat(3)
    assert (content(tmp_path)["step"], content(tmp_path)["excused"]) == (3, True)
    lock.release(clean=True)
    assert content(tmp_path)["step"] is None


def test_one_process_gets_it_once_by_whatever_path(tmp_path: Path) -> None:
    run, alias = tmp_path / "run", tmp_path / "alias"
    run.mkdir()
    alias.symlink_to(run)
    lock = RunLock.acquire(run)
    for path in (run, alias):
        with pytest.raises(UsageError, match="this process already trains in"):
            RunLock.acquire(path)
    assert "is being trained by" in try_elsewhere(run), "the refused attempt has dropped the lock"
    lock.release(clean=True)
    lock.release(clean=False)  # nothing more to let go, nothing more to say
    lock.beat(5)
    again = RunLock.acquire(alias)
    assert again.died_in_step is None
    again.release(clean=True)
    assert try_elsewhere(run) == ""


SOUND = {"pid": 12, "host": "h", "since": "now", "step": 5, "died_in_step": None, "dead": []}
FORGED: list[dict[str, object]] = [
    {"step": "x"},
    {"step": -1},
    {"step": True},
    {"step": 5.0},
    {"died_in_step": "x"},
    {"died_in_step": {}},
    {"dead": None},
    {"dead": ["x"]},
    {"dead": "12"},
    {"dead": 3},
    {"pid": -1},  # what we say can be pasted: kill -INT <pid>
    {"pid": 0},
    {"pid": "1; rm -r /"},
    {"host": None},
    {"host": "\x1b[2J"},
    {"since": 0},
    {"excused": "yes"},
    {"deaths": 2},
]


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_what_cannot_be_is_as_if_nothing_were_there(tmp_path: Path, forged: dict[str, object]) -> None:
    (tmp_path / "lock").write_text(json.dumps({**SOUND, "step": 5}))
    assert left_in(tmp_path) == (5, (12,))
    (tmp_path / "lock").write_text(json.dumps(SOUND | forged))
    assert left_in(tmp_path) == (None, ())


def test_a_holder_that_cannot_be_is_not_named(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    (tmp_path / "lock").write_text(json.dumps(SOUND | {"pid": "1; rm -r /"}))
    assert try_elsewhere(tmp_path).startswith(f"{tmp_path} is being trained by another process\n")
    lock.release(clean=True)


JUNK = [b"", b"\0" * 512, b'{"pid": 1}', b"[]", b"\xff{", b'{"pid": 12, "host": "h", "si', b"[" * 512, b"7", b"null"]


@pytest.mark.parametrize("junk", JUNK)
def test_what_the_file_held_before_may_be_anything(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "lock").write_bytes(junk)
    lock = RunLock.acquire(tmp_path)
    assert lock.died_in_step is None
    lock.beat(3)
    lock.release(clean=False)
    assert content(tmp_path)["step"] == 3 and (tmp_path / "lock").stat().st_size == 512


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*/runs/x/lock: the folder does not exist"):
        RunLock.acquire(tmp_path / "runs/x")
    run = tmp_path / "deleted while it is trained in"
    run.mkdir()
    lock = RunLock.acquire(run)
    (run / "lock").unlink()
    run.rmdir()
    lock.beat(2)
    lock.release(clean=True)
    assert not run.exists()


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from trainwright.errors import StorageError
from trainwright.runs.lock import RunLock
if os.geteuid() == 0:  # permissions do not bind root
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    RunLock.acquire(Path(sys.argv[1]))
except StorageError as error:
    print(error)
"""
    tmp_path.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    tmp_path.chmod(0o755)
    assert "lock: permission denied" in done.stdout and "remedy" in done.stdout


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 16 KiB."""
    with small_disk(tmp_path / "disk", "size=16k") as disk:
        yield disk


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)


def test_a_read_only_disk(tiny_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(StorageError, match="lock: the file system is read-only"):
        RunLock.acquire(tiny_disk)


def test_a_full_disk_refuses_a_start_and_no_step(tiny_disk: Path) -> None:
    lock = RunLock.acquire(tiny_disk)
    fill(tiny_disk)
    lock.beat(7)  # takes no new space
    lock.release(clean=False)
    assert content(tiny_disk)["step"] == 7
    lock = RunLock.acquire(tiny_disk)
    os.truncate(tiny_disk / "lock", 0)
    with (tiny_disk / "ballast").open("ab", buffering=0) as file:
        file.write(b"x" * 4096)  # the page that it had
    lock.beat(8)
    lock.release(clean=True)
    assert (tiny_disk / "lock").read_bytes() == b""
    with pytest.raises(StorageError, match="the disk is full"):
        RunLock.acquire(tiny_disk)


# seccomp answers flock() with ENOSYS, as Lustre without -o flock does.
WITHOUT_LOCKS = """
import ctypes, errno, platform, struct, sys
from pathlib import Path
from trainwright.runs.lock import RunLock
number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
allow, refuse = 0x7FFF0000, 0x00050000 | errno.ENOSYS
program = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, refuse), (0x06, 0, 0, allow)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter, 0, 0):
    print("may not filter system calls")
    sys.exit()
lock = RunLock.acquire(Path(sys.argv[1]))
lock.beat(9)
lock.release(clean=False)
print(lock.exclusive)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"), reason="seccomp is Linux's"
)
def test_a_file_system_without_locks_stops_no_training(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LOCKS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if "may not" in done.stdout:
        pytest.skip(done.stdout)
    assert done.stdout.strip() == "False" and content(tmp_path)["step"] == 9
