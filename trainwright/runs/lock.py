"""The lock of a run folder: only one process trains in it at a time, and the lock file records the step it died in.

``<run>/lock`` is one line of JSON, padded to a fixed size, which ``cat`` shows:

    {"excused": false, "pid": 1234, "host": "node7", "since": "2026-05-01T12:00:00+00:00", "step":              417,
     "starting": false, "died_in_step": null, "dead": [], "sure": 0}

The lock is an flock, which belongs to one open file description. The kernel releases it when the process ends, in
whatever way. Unlike a POSIX record lock, it is not released when something else in the process reads and closes the
file (a copy of the run folder, a tracker that uploads it). The price: a forked child (a data worker) inherits it and
could outlive the process, so each child closes it first. The file is never deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

from trainwright.errors import StorageError, UsageError
from trainwright.runs.files import UnreadableFile, open_file, parse_json
from trainwright.runs.storage import open_own, storage_error

SIZE = 512  # bytes: a host name has at most 255; less than one page, so a kill cannot tear it
STEP_SIZE = 16  # of the number of the step, which mostly is all that is new in the line
MOST_DEAD = 8  # pids that are kept of a series of deaths
MANY_DEATHS = 4
"""Deaths in one step in a row that are no chance, even of processes that had only just started."""
FEW_STEPS = 8
"""A process that has finished fewer steps has only just started: a kill hits one of so few by chance."""
_NO_LOCKS_HERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # Lustre without -o flock, some FUSE and NFS mounts
# The line begins with one of these. A signal handler writes only this part, and ``beat`` only the rest: neither
# overwrites the other, whenever the signal comes.
_COUNTED, _EXCUSED = b'{"excused": false, ', b'{"excused": true,  '

_held: dict[tuple[int, int], RunLock] = {}  # by device and inode, which are the same for every path


@dataclass(frozen=True)
class Holder:
    """The content of the lock file: the process that holds the lock, or held it last.

    ``step`` is in progress (None: no step was begun, or all ended well); ``excused`` means that the process was asked
    to stop during it, ``starting`` that it has finished few steps and raised no error. ``died_in_step`` is the step in
    which the processes ``dead`` (pids) died before, one after the other, and ``sure`` is for how many of them, after
    the first, that is no chance; all are reset when a later step begins.
    """

    pid: int
    host: str
    since: str
    step: int | None
    died_in_step: int | None
    dead: tuple[int, ...] = ()
    sure: int = 0
    starting: bool = False
    excused: bool = False


class DeathsInStep(NamedTuple):
    """Processes ``dead`` (pids, the last of them) that died in ``step`` one after the other; see Holder."""

    step: int | None = None
    dead: tuple[int, ...] = ()
    sure: int = 0


class RunLock:
    """The training process holds it from ``acquire`` to ``release``; forked children do not.

    ``died_in_step`` is the step in which the previous holder died (or failed), None when it ended well; ``dead`` are
    the pids of the processes that died in it in a row, the last one last (at most the last 8). ``is_loop``: it is more
    than chance that they died in the same step. ``exclusive`` is False where the file system has no locks: then nothing
    keeps a second process out.
    """

    def __init__(self, fd: int, before: Holder | None, *, exclusive: bool) -> None:
        self._fd, self._identity = fd, _identity(fd)
        self._row = _row_left_by(before)
        self.died_in_step, self.dead, _ = self._row
        self._written: tuple[DeathsInStep, bool] | None = None  # what all but the step follows from
        self.is_loop = self._row.sure > 0 or self.deaths >= MANY_DEATHS
        self._step: int | None = None
        self._first_step: int | None = None
        self.exclusive = exclusive
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._before_step = f'{json.dumps(me)[1:-1]}, "step": '.encode()
        self._step_at = len(_COUNTED) + len(self._before_step)

    @property
    def deaths(self) -> int:
        """How many processes in a row died in ``died_in_step``, at most ``MOST_DEAD``."""
        return len(self.dead)

    @classmethod
    def acquire(cls, path: Path) -> RunLock:
        """Takes the lock of the run folder ``path``.

        Raises UsageError when a process (this one included) already trains there, StorageError when the file cannot
        be opened or written.
        """
        _close_in_forked_children()
        file = path / "lock"
        with contextlib.ExitStack() as undo:
            try:
                fd = open_own(file, os.O_RDWR)
                undo.callback(os.close, fd)
                if _identity(fd) in _held:
                    remedy = "wait until it is done there, or start another run"
                    raise UsageError(f"{path} is being trained by this very process", remedy=remedy)
                exclusive = _lock(fd, path)
                lock = cls(fd, _holder(fd), exclusive=exclusive)
                os.pwrite(fd, _COUNTED + lock._rest(_padded(None), starting=False), 0)
            except OSError as error:
                raise storage_error(error, file, "write") from error
            _held[lock._identity] = lock
            undo.pop_all()
        return lock

    def beat(self, step: int) -> None:
        """Records that ``step`` is in progress (about 2 us). Never raises: a full disk must not stop the training."""
        if self.died_in_step is not None and step > self.died_in_step:
            self._row = DeathsInStep()
        if self._first_step is None:
            self._first_step = step
        self._write(step)

    def excuse(self) -> None:
        """Records that this process was asked to stop: if it is killed now, the step is not at fault.

        A signal handler may call it at any time. Never raises.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, _EXCUSED, 0)

    def forget_step(self) -> None:
        """Records that no step is in progress: if the process ends now, no step is at fault. Never raises."""
        self._write(None)

    def release(self, clean: bool) -> None:
        """Releases the lock; a second call does nothing. ``clean``: the run ended well, and no death is recorded."""
        if self._fd < 0:
            return
        if clean:
            self._row = DeathsInStep()
            self._write(None)
        elif self._step is not None:
            self._first_step = None
            self._write(self._step)
        del _held[self._identity]
        fd, self._fd = self._fd, -1  # before it is closed: a signal handler must not write to a reused descriptor
        with contextlib.suppress(OSError):  # a network mount that has gone: the kernel releases the lock all the same
            fcntl.flock(fd, fcntl.LOCK_UN)  # explicitly: a program that is just being started has the descriptor too
        with contextlib.suppress(OSError):
            os.close(fd)

    def require_place(self, path: Path) -> None:
        """Raises StorageError unless ``path`` is still the folder of this lock, or that folder was deleted.

        A folder that was renamed or unmounted takes its open files along.
        """
        held = os.fstat(self._fd)
        try:
            there = (path / "lock").lstat()
        except FileNotFoundError:
            if held.st_nlink == 0:
                return
        else:
            if (there.st_dev, there.st_ino) == self._identity:
                return
        raise StorageError(
            f"{path} is no longer the folder of this run: it was renamed, replaced or unmounted{self._now_at()}",
            remedy=f"put it back as {path}: the next save goes there",
        )

    def _now_at(self) -> str:
        """Where the folder is now, as far as the system says."""
        try:
            now = Path(f"/proc/self/fd/{self._fd}").readlink()
            seen = now.lstat()
        except OSError:  # not Linux, or not reachable
            return ""
        return f", its log is in {now.parent}" if (seen.st_dev, seen.st_ino) == self._identity else ""

    def _write(self, step: int | None) -> None:
        self._step = step
        first = self._first_step
        number = _padded(step)
        starting = step is not None and first is not None and step < first + FEW_STEPS
        follows_from = self._row, starting
        try:
            if self._written == follows_from:
                os.pwrite(self._fd, number, self._step_at)
                return
            os.pwrite(self._fd, self._rest(number, starting=starting), len(_COUNTED))
            self._written = follows_from
        except OSError:
            pass

    def _rest(self, number: bytes, *, starting: bool) -> bytes:
        """The line after the part that says whether the process is excused."""
        row = self._row
        died = f'"died_in_step": {json.dumps(row.step)}, "dead": {list(row.dead)}, "sure": {row.sure}}}'
        after = f', "starting": {json.dumps(starting)}, {died}'.encode()
        return (self._before_step + number + after).ljust(SIZE - len(_COUNTED) - 1) + b"\n"


class NoLock:
    """Of a rank that writes nothing to the run folder: the first rank holds the lock."""

    def beat(self, step: int) -> None: ...


def is_held(path: Path) -> bool | None:
    """Whether a process trains in the run folder ``path``. None: there is no lock file, or no locks on that disk."""
    try:
        file = open_file(path / "lock")
    except UnreadableFile:
        return None
    fd = file.fileno()
    try:
        if _identity(fd) in _held:
            return True
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        return True if error.errno in (errno.EAGAIN, errno.EACCES) else None
    finally:
        file.close()
    return False


def _row_left_by(before: Holder | None) -> DeathsInStep:
    """The step in which the processes before this one died, and which.

    A kill from outside says nothing of the step, and hardly ever hits the same one by chance; but for that of a process
    that has only just started. To raise an error in the same step is no chance.
    """
    if before is None:
        return DeathsInStep()
    if before.step is None or before.excused:  # it ended well, began no step or was asked to stop: nothing is new
        return DeathsInStep(before.died_in_step, before.dead, before.sure)
    if before.step != before.died_in_step:
        return DeathsInStep(before.step, (before.pid,))
    return DeathsInStep(before.step, (*before.dead, before.pid)[-MOST_DEAD:], before.sure + (not before.starting))


@cache
def _close_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def _leave_to_the_parent() -> None:
    """Closes the inherited descriptors without releasing the lock, which belongs to the parent."""
    for lock in _held.values():
        os.close(lock._fd)
        lock._fd = -1
    _held.clear()


def _padded(step: int | None) -> bytes:
    """A step as JSON, always as long: another number is written in its place."""
    return b"null".rjust(STEP_SIZE) if step is None else b"%*d" % (STEP_SIZE, step)


def _identity(fd: int) -> tuple[int, int]:
    seen = os.fstat(fd)
    return seen.st_dev, seen.st_ino


def _lock(fd: int, path: Path) -> bool:
    """Takes the flock; False where the file system has no locks. Raises UsageError when another process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS_HERE:
            return False
        if error.errno in (errno.EAGAIN, errno.EACCES):  # the second by some network mounts
            raise _busy(path, _holder(fd)) from None
        raise
    return True


def _holder(fd: int) -> Holder | None:
    """The content of the file; None when it is new or not valid."""
    try:
        fields = parse_json(os.pread(fd, SIZE, 0).decode())
        holder = Holder(**{**fields, "dead": tuple(fields["dead"])})
    except (ValueError, TypeError, KeyError):
        return None
    steps = [step for step in (holder.step, holder.died_in_step) if step is not None]
    numbers = all(type(each) is int and each > 0 for each in (holder.pid, *steps, *holder.dead))
    numbers = numbers and type(holder.sure) is int and holder.sure >= 0
    words = all(type(each) is str and each.isprintable() for each in (holder.host, holder.since))
    flags = all(type(each) is bool for each in (holder.excused, holder.starting))
    return holder if numbers and words and flags else None


def _busy(path: Path, holder: Holder | None) -> UsageError:
    if holder is None:
        return UsageError(f"{path} is being trained by another process", remedy="wait for it, or start another run")
    step = "" if holder.step is None else f", now in step {holder.step}"
    where = "" if holder.host == socket.gethostname() else f" on {holder.host}"
    return UsageError(
        f"{path} is being trained by process {holder.pid} (on host {holder.host} since {holder.since}{step})",
        # SIGINT, for what else makes a run save is a setting of its recipe
        remedy=f"wait for it, stop it (kill -INT {holder.pid}{where} saves and ends it), or start another run",
    )
