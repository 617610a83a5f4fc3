"""The lock of a run folder: one process trains in it at a time, and what it leaves behind tells in which step it died.

``<run>/lock`` is one line of JSON, padded to a fixed size, which ``cat`` shows:

    {"pid": 1234, "host": "node7", "since": "2026-05-01T12:00:00+00:00", "step": 417, "died_in_step": null, "deaths": 0}

The lock is a POSIX record lock. The kernel drops it with the process, however that ends, and forked children (workers
that load data) do not inherit it, as they would an flock. The price: it is also dropped when the process closes *any*
descriptor of the file, so nothing in the process that trains may open ``<run>/lock``. The file is never deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainwright.errors import UsageError
from trainwright.runlog.storage import storage_error

SIZE = 512  # bytes: a host name has at most 255; within one page, so no kill tears it
_NO_LOCKS_HERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # Lustre without -o flock, some FUSE and NFS mounts

_held: set[tuple[int, int, int]] = set()  # (pid, device, inode): a forked child holds nothing
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Holder:
    """What the file says of the process that holds the lock, or held it last.

    ``step`` is in progress (None: no step was begun, or all ended well). ``died_in_step`` is the one that the process
    before died in, and as many before it in a row as ``deaths`` says, until a later step is begun.
    """

    pid: int
    host: str
    since: str
    step: int | None
    died_in_step: int | None
    deaths: int = 0


class RunLock:
    """Held from ``acquire`` to ``release``, by the process that trains.

    ``died_in_step`` is the step in which the previous holder died (or failed), None when it ended well; ``deaths`` is
    how many processes in a row died in it.
    ``exclusive`` is False where the file system has no locks: then nothing keeps a second process out.
    """

    def __init__(self, fd: int, before: Holder | None, *, exclusive: bool) -> None:
        self._fd, self._identity = fd, _identity_of(os.fstat(fd))
        self.died_in_step, self.deaths, self.exclusive = *_death(before), exclusive
        me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._head = json.dumps(me).removesuffix("}")

    @classmethod
    def acquire(cls, path: Path) -> RunLock:
        """The lock of the run folder ``path``.

        Raises UsageError when a process (this one included) trains there already, StorageError when the file cannot
        be opened or written.
        """
        file = path / "lock"
        with _one_at_a_time, contextlib.ExitStack() as undo:
            if _identity(file) in _held:  # asked before opening it: closing it again would drop the lock
                remedy = "wait until it is done there, or start another run"
                raise UsageError(f"{path} is being trained by this very process", remedy=remedy)
            try:
                fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                undo.callback(os.close, fd)
                exclusive = _lock(fd, path)
                lock = cls(fd, _holder(fd), exclusive=exclusive)
                lock._write(None, lock.died_in_step, lock.deaths)
            except OSError as error:
                raise storage_error(error, file, "write") from error
            _held.add(lock._identity)
            undo.pop_all()
        return lock

    def beat(self, step: int) -> None:
        """Says that ``step`` is in progress (about 2 us). Never raises: a full disk must not stop the training."""
        passed = self.died_in_step is None or step > self.died_in_step
        with contextlib.suppress(OSError):
            self._write(step) if passed else self._write(step, self.died_in_step, self.deaths)

    def release(self, clean: bool) -> None:
        """Lets go; a second call does nothing. ``clean`` says that the run ended well: nothing is left behind then."""
        with _one_at_a_time:
            if self._fd < 0:
                return
            with contextlib.suppress(OSError):
                if clean:
                    self._write(None)
            with contextlib.suppress(OSError):  # a network mount that has gone: the kernel lets go all the same
                os.close(self._fd)
            _held.discard(self._identity)
            self._fd = -1

    def _write(self, step: int | None, died_in_step: int | None = None, deaths: int = 0) -> None:
        line = f'{self._head}, "step": {_json(step)}, "died_in_step": {_json(died_in_step)}, "deaths": {deaths}}}'
        os.pwrite(self._fd, line.ljust(SIZE - 1).encode() + b"\n", 0)


def _death(before: Holder | None) -> tuple[int | None, int]:
    """The step that the holder before died in, and how many have in a row."""
    if before is None:
        return None, 0
    if before.step is None:  # it ended well, or died before it began a step and forgets nothing
        return before.died_in_step, before.deaths
    return before.step, before.deaths + 1 if before.step == before.died_in_step else 1


def _json(step: int | None) -> str:
    return "null" if step is None else str(step)


def _identity(file: Path) -> tuple[int, int, int] | None:
    """Of the file, whatever path leads to it; None when there is none."""
    try:
        return _identity_of(file.stat())
    except OSError:
        return None


def _identity_of(seen: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), seen.st_dev, seen.st_ino


def _lock(fd: int, path: Path) -> bool:
    """Whether the file system has locks. Raises UsageError when another process holds this one."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS_HERE:
            return False
        if error.errno in (errno.EAGAIN, errno.EACCES):  # POSIX leaves open which
            raise _busy(path, _holder(fd)) from None
        raise
    return True


def _holder(fd: int) -> Holder | None:
    """What the file says, None when it is new or says nothing that can be read."""
    try:
        return Holder(**json.loads(os.pread(fd, SIZE, 0)))
    except (ValueError, TypeError):
        return None


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
