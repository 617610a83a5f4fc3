"""The lock of a run folder: one process trains in it at a time, and what it leaves behind tells in which step it died.

``<run>/lock`` is one line of JSON, padded to a fixed size, which ``cat`` shows:

    {"excused": false, "pid": 1234, "host": "node7", "since": "2026-05-01T12:00:00+00:00", "step": 417,
     "died_in_step": null, "dead": []}

The lock is an flock: it belongs to the one description with which the file was opened. The kernel drops it with the
process, however that ends, and not because something in the process reads the file too (a copy of the run folder, a
tracker that uploads it), as it would a POSIX record lock. The price: a forked child (a worker that loads data)
inherits it and could outlive the process, so each child closes it first of all. The file is never deleted.
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

from trainwright.errors import UsageError
from trainwright.runlog.storage import storage_error

SIZE = 512  # bytes: a host name has at most 255; within one page, so no kill tears it
MOST_DEAD = 8  # pids that are kept of a row of deaths
_NO_LOCKS_HERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # Lustre without -o flock, some FUSE and NFS mounts
# The line begins with one of these. A signal handler writes only them, and a beat only what follows them: neither
# undoes what the other wrote, wherever in a beat the signal comes.
_COUNTED, _EXCUSED = b'{"excused": false, ', b'{"excused": true,  '

_held: dict[tuple[int, int], RunLock] = {}  # by device and inode, which are the same by whatever path


@dataclass(frozen=True)
class Holder:
    """What the file says of the process that holds the lock, or held it last.

    ``step`` is in progress (None: no step was begun, or all ended well); ``excused`` says that the process had been
    asked to stop in it. ``died_in_step`` is the one that the processes ``dead`` (pids) before died in, one after the
    other, until a later step is begun.
    """

    pid: int
    host: str
    since: str
    step: int | None
    died_in_step: int | None
    dead: tuple[int, ...] = ()
    excused: bool = False


class RunLock:
    """Held from ``acquire`` to ``release``, by the process that trains; its forked children hold nothing.

    ``died_in_step`` is the step in which the previous holder died (or failed), None when it ended well; ``dead`` are
    the pids of the processes that did so one after the other, the last one last (of a long row the last 8).
    ``exclusive`` is False where the file system has no locks: then nothing keeps a second process out.
    """

    def __init__(self, fd: int, before: Holder | None, *, exclusive: bool) -> None:
        self._fd, self._identity = fd, _identity(fd)
        self.died_in_step, self.dead = self._row = _row_left_by(before)
        self.exclusive = exclusive
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._me = json.dumps(me)[1:-1]

    @property
    def deaths(self) -> int:
        """How many processes in a row died in ``died_in_step``, as far as they are kept."""
        return len(self.dead)

    @classmethod
    def acquire(cls, path: Path) -> RunLock:
        """The lock of the run folder ``path``.

        Raises UsageError when a process (this one included) trains there already, StorageError when the file cannot
        be opened or written.
        """
        _close_in_forked_children()
        file = path / "lock"
        with contextlib.ExitStack() as undo:
            try:
                fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                undo.callback(os.close, fd)
                if _identity(fd) in _held:
                    remedy = "wait until it is done there, or start another run"
                    raise UsageError(f"{path} is being trained by this very process", remedy=remedy)
                exclusive = _lock(fd, path)
                lock = cls(fd, _holder(fd), exclusive=exclusive)
                os.pwrite(fd, _COUNTED + lock._rest(None), 0)
            except OSError as error:
                raise storage_error(error, file, "write") from error
            _held[lock._identity] = lock
            undo.pop_all()
        return lock

    def beat(self, step: int) -> None:
        """Says that ``step`` is in progress (about 2 us). Never raises: a full disk must not stop the training."""
        if self.died_in_step is not None and step > self.died_in_step:
            self._row = None, ()
        self._write(step)

    def excuse(self) -> None:
        """Says that this process was asked to stop: should it be killed now, no step is to blame.

        May be called by a signal handler, at any instant. Never raises.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, _EXCUSED, 0)

    def forget_step(self) -> None:
        """Says that no step is in progress: what ends the process now (a full disk) lies with none. Never raises."""
        self._write(None)

    def release(self, clean: bool) -> None:
        """Lets go; a second call does nothing. ``clean`` says that the run ended well: nothing is left behind then."""
        if self._fd < 0:
            return
        if clean:
            self._row = None, ()
            self._write(None)
        del _held[self._identity]
        fd, self._fd = self._fd, -1  # before it is closed: a signal handler must not write into whatever has it next
        with contextlib.suppress(OSError):  # a network mount that has gone: the kernel lets go all the same
            fcntl.flock(fd, fcntl.LOCK_UN)  # for a program that is being started this instant has the descriptor too
        with contextlib.suppress(OSError):
            os.close(fd)

    def _write(self, step: int | None) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, self._rest(step), len(_COUNTED))

    def _rest(self, step: int | None) -> bytes:
        """The line after its beginning."""
        died_in_step, dead = self._row
        line = f'{self._me}, "step": {_json(step)}, "died_in_step": {_json(died_in_step)}, "dead": {list(dead)}}}'
        return line.ljust(SIZE - len(_COUNTED) - 1).encode() + b"\n"


def _row_left_by(before: Holder | None) -> tuple[int | None, tuple[int, ...]]:
    """The step that the processes before died in, and their pids."""
    if before is None:
        return None, ()
    if before.step is None or before.excused:  # it ended well, began no step or was told to end: it forgets nothing
        return before.died_in_step, before.dead
    row = before.dead if before.step == before.died_in_step else ()
    return before.step, (*row, before.pid)[-MOST_DEAD:]


@cache
def _close_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def _leave_to_the_parent() -> None:
    for lock in _held.values():
        os.close(lock._fd)
        lock._fd = -1
    _held.clear()


def _json(step: int | None) -> str:
    return "null" if step is None else str(step)


def _identity(fd: int) -> tuple[int, int]:
    seen = os.fstat(fd)
    return seen.st_dev, seen.st_ino


def _lock(fd: int, path: Path) -> bool:
    """Whether the file system has locks. Raises UsageError when another process holds this one."""
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
    """What the file says, None when it is new or says nothing that can be believed."""
    try:
        said = json.loads(os.pread(fd, SIZE, 0))
        holder = Holder(**{**said, "dead": tuple(said["dead"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    steps = [step for step in (holder.step, holder.died_in_step) if step is not None]
    numbers = all(type(each) is int and each > 0 for each in (holder.pid, *steps, *holder.dead))
    words = all(type(each) is str and each.isprintable() for each in (holder.host, holder.since))
    return holder if numbers and words and type(holder.excused) is bool else None


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
