"""The lock of a run folder: one process trains in it at a time, and the lock file records the step in which it died.

``<run>/lock`` is one line of JSON, padded to a fixed size, which ``cat`` shows:
    {"excused": false, "pid": 1234, "host": "node7", "since": "2026-05-01T12:00:00+00:00", "step":              417,
     "starting": false, "died_in_step": null, "dead": [], "sure": 0}

The lock is an flock, which belongs to one open file description (on Windows it is a locked byte). The kernel releases
it when the process ends for any reason. Unlike a POSIX record lock, it is not released when something else in the
process reads and closes the file (a copy of the run folder, a tracker that uploads it). The price: a forked child (a
data worker) inherits it and could outlive the process, so each child closes it first. The file is never deleted.
"""

from __future__ import annotations

import contextlib
import errno
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
from trainwright.runs.storage import open_for_writing, storage_error
from trainwright.runs.system_calls import after_fork, read_at, try_lock, unlock, write_at

LINE_BYTES = 512  # bytes: a host name has at most 255; less than one page, so a kill cannot tear it
STEP_FIELD_BYTES = 16  # bytes of the step number, usually the only part of the line that changes
MAX_PIDS_KEPT = 8  # recorded pids of processes that died in a row
MIN_DEATHS_OF_LOOP = 4
"""Number of consecutive deaths in one step that cannot be chance, even if all processes had just started."""
STARTUP_STEPS = 8
"""A process that has finished fewer steps has just started: kills in the same step may then be chance."""
_NO_LOCKS_HERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # Lustre without -o flock, some FUSE and NFS mounts
# The line begins with one of these. A signal handler writes only this part, and ``beat`` only the rest: neither
# overwrites the other, whenever the signal comes.
_COUNTED, _EXCUSED = b'{"excused": false, ', b'{"excused": true,  '

_locks: dict[tuple[int, int], RunLock] = {}  # by device and inode, which are the same for every path


@dataclass(frozen=True)
class Holder:
    """The content of the lock file: the process that holds the lock, or held it last.

    ``step`` is in progress (None: no step was begun, or all ended well). ``excused``: the process received a signal to
    stop during ``step``. ``starting``: the process has finished few steps and raised no error. ``died_in_step`` is the
    step in which the previous processes ``dead`` (pids) died in a row. ``sure`` is the number of these deaths, without
    the first, that cannot be chance. These three values are reset when a later step begins.
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
    """Processes ``dead`` (the last pids) that died in ``step`` in a row; see Holder."""

    step: int | None = None
    dead: tuple[int, ...] = ()
    sure: int = 0


class RunLock:
    """The lock that the training process holds from ``acquire`` to ``release``; forked children do not hold it.

    ``died_in_step`` is the step in which the processes ``dead`` (pids, the newest last, at most 8) died or failed in a
    row; None if the run has got past it, or ended well. ``is_loop`` is True if it cannot be chance that they died in
    the same step. ``exclusive`` is False if the file system has no locks: then nothing prevents a second process.
    """

    def __init__(self, fd: int, before: Holder | None, *, exclusive: bool) -> None:
        self._fd, self._identity = fd, _identity(fd)
        self._row = _deaths_before(before)
        self.died_in_step, self.dead, _ = self._row
        self._written: tuple[DeathsInStep, bool] | None = None  # determines the line on disk, except its step
        self.is_loop = self._row.sure > 0 or self.deaths >= MIN_DEATHS_OF_LOOP
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
        """The number of processes in a row that died in ``died_in_step``, at most ``MAX_PIDS_KEPT``."""
        return len(self.dead)

    @classmethod
    def acquire(cls, path: Path) -> RunLock:
        """Take the lock of the run folder ``path``.

        Raises UsageError when a process (this one included) already trains there, StorageError when the file cannot
        be opened or written.
        """
        _close_in_forked_children()
        file = path / "lock"
        with contextlib.ExitStack() as undo:
            try:
                fd = open_for_writing(file, os.O_RDWR)
                undo.callback(os.close, fd)
                if _identity(fd) in _locks:
                    remedy = "wait until it is done there, or start another run"
                    raise UsageError(f"this process already trains in {path}", remedy=remedy)
                exclusive = _lock(fd, path)
                lock = cls(fd, _holder(fd), exclusive=exclusive)
                write_at(fd, _COUNTED + lock._line_after_flag(_pad_step(None), starting=False), 0)
            except OSError as error:
                raise storage_error(error, file, "write") from error
            _locks[lock._identity] = lock
            undo.pop_all()
        return lock

    def beat(self, step: int) -> None:
        """Record that ``step`` is in progress (about 2 us). Never raises: a full disk must not stop the training."""
        if self.died_in_step is not None and step > self.died_in_step:
            self._row = DeathsInStep()
        if self._first_step is None:
            self._first_step = step
        self._write(step)

    def excuse(self) -> None:
        """Record that this process received a signal to stop: if it is killed now, the step is not at fault.

        A signal handler may call it at any time. Never raises.
        """
        with contextlib.suppress(OSError):
            write_at(self._fd, _EXCUSED, 0)

    def forget_step(self) -> None:
        """Record that no step is in progress: if the process ends now, no step is at fault. Never raises."""
        self._write(None)

    def release(self, clean: bool) -> None:
        """Release the lock; a second call does nothing. ``clean``: the run ended well, and no death is recorded."""
        if self._fd < 0:
            return
        if clean:
            self._row = DeathsInStep()
            self._write(None)
        elif self._step is not None:
            self._first_step = None
            self._write(self._step)
        del _locks[self._identity]
        fd, self._fd = self._fd, -1  # before it is closed: a signal handler must not write to a reused descriptor
        with contextlib.suppress(OSError):  # the network mount is gone: the kernel releases the lock anyway
            unlock(fd)  # closing is not enough while a program that is being started has the descriptor, too
        with contextlib.suppress(OSError):
            os.close(fd)

    def require_place(self, path: Path) -> None:
        """Raise StorageError if ``path`` is no longer the folder of this lock. A deleted folder is not an error here.

        Open files stay in a folder that was renamed or unmounted, so writing to them does not fail.
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
        """Return the current place of the folder as text, if the system reports it."""
        try:
            now = Path(f"/proc/self/fd/{self._fd}").readlink()
            seen = now.lstat()
        except OSError:  # not Linux, or not reachable
            return ""
        return f", its log is in {now.parent}" if (seen.st_dev, seen.st_ino) == self._identity else ""

    def _write(self, step: int | None) -> None:
        self._step = step
        first = self._first_step
        number = _pad_step(step)
        starting = step is not None and first is not None and step < first + STARTUP_STEPS
        follows_from = self._row, starting
        try:
            if self._written == follows_from:
                write_at(self._fd, number, self._step_at)
                return
            write_at(self._fd, self._line_after_flag(number, starting=starting), len(_COUNTED))
            self._written = follows_from
        except OSError:
            pass

    def _line_after_flag(self, number: bytes, *, starting: bool) -> bytes:
        """Return the line after the part that records whether the process is excused."""
        row = self._row
        died = f'"died_in_step": {json.dumps(row.step)}, "dead": {list(row.dead)}, "sure": {row.sure}}}'
        after = f', "starting": {json.dumps(starting)}, {died}'.encode()
        return (self._before_step + number + after).ljust(LINE_BYTES - len(_COUNTED) - 1) + b"\n"


class NoLock:
    """The lock of a rank that writes nothing to the run folder: the first rank holds the real lock."""

    def beat(self, step: int) -> None: ...


def is_locked(path: Path) -> bool | None:
    """Return True if a process trains in the run folder ``path``; None without a lock file, or if locks do not work."""
    try:
        file = open_file(path / "lock")
    except UnreadableFile:
        return None
    fd = file.fileno()
    try:
        if _identity(fd) in _locks:
            return True
        if not try_lock(fd, shared=True):
            return True
        unlock(fd)
    except OSError:
        return None
    finally:
        file.close()
    return False


def _deaths_before(before: Holder | None) -> DeathsInStep:
    """Return the step in which the processes before this one died, and their pids.

    One kill from outside does not show that the step is at fault. A second kill rarely hits the same step by chance,
    except in a process that has just started. An error raised in the same step is not chance.
    """
    if before is None:
        return DeathsInStep()
    if before.step is None or before.excused:  # the last process ended well, began no step or received a signal to stop
        return DeathsInStep(before.died_in_step, before.dead, before.sure)
    if before.step != before.died_in_step:
        return DeathsInStep(before.step, (before.pid,))
    return DeathsInStep(before.step, (*before.dead, before.pid)[-MAX_PIDS_KEPT:], before.sure + (not before.starting))


@cache
def _close_in_forked_children() -> None:
    after_fork(_close_inherited)


def _close_inherited() -> None:
    """Close the inherited descriptors without releasing the lock, which belongs to the parent."""
    for lock in _locks.values():
        os.close(lock._fd)
        lock._fd = -1
    _locks.clear()


def _pad_step(step: int | None) -> bytes:
    """Return a step as JSON of constant length, so that another number can be written in its place."""
    return b"null".rjust(STEP_FIELD_BYTES) if step is None else b"%*d" % (STEP_FIELD_BYTES, step)


def _identity(fd: int) -> tuple[int, int]:
    seen = os.fstat(fd)
    return seen.st_dev, seen.st_ino


def _lock(fd: int, path: Path) -> bool:
    """Take the flock; False if the file system has no locks. Raises UsageError when another process holds it."""
    try:
        if not try_lock(fd):
            raise _busy(path, _holder(fd))
    except OSError as error:
        if error.errno in _NO_LOCKS_HERE:
            return False
        raise
    return True


def _holder(fd: int) -> Holder | None:
    """Return the content of the file; None when it is new or not valid."""
    try:
        fields = parse_json(read_at(fd, LINE_BYTES, 0).decode())
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
        # SIGINT, because the other signals that make a run save are set in its recipe
        remedy=f"wait for it, stop it (kill -INT {holder.pid}{where} saves and ends it), or start another run",
    )
