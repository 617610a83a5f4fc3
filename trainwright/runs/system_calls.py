"""Calls of the operating system for files of a run, with a replacement where Windows or macOS lacks one."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    import msvcrt

LOCKED_BYTE = 1 << 40
"""The byte that is locked on Windows, far behind the end of a file: other processes cannot read a locked byte."""
OPEN_FLAGS = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_NOINHERIT", "O_BINARY"))
"""Flags of ``os.open`` for all files of a run. O_NONBLOCK: a pipe without a reader or writer does not wait for it."""
FOLLOW_LINKS_FLAGS = OPEN_FLAGS & ~getattr(os, "O_NOFOLLOW", 0)


def open_file(path: Path, flags: int) -> int:
    """Open a file and return its descriptor. Raises OSError, for a symbolic link too."""
    if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags | OPEN_FLAGS, 0o644)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file; return False if another process holds the lock. Raises OSError where there are no locks.

    Linux and macOS use flock, which belongs to the open file description: processes that inherit the descriptor hold
    the lock, too. On Windows a shared lock is an exclusive one.
    """
    try:
        if sys.platform == "win32":
            os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):  # EACCES on some network mounts
            return False
        raise
    return True


def unlock(fd: int) -> None:
    """Release the lock, also for processes that have inherited the descriptor. Raises OSError."""
    if sys.platform == "win32":
        os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)


def read_at(fd: int, num_bytes: int, position: int) -> bytes:
    """Read from a position of a file."""
    if sys.platform == "win32":
        os.lseek(fd, position, os.SEEK_SET)
        return os.read(fd, num_bytes)
    else:
        return os.pread(fd, num_bytes, position)


def write_at(fd: int, content: bytes, position: int) -> None:
    """Write at a position of a file. On Windows two threads, or a signal handler, may disturb each other."""
    if sys.platform != "win32":
        os.pwrite(fd, content, position)
    else:
        os.lseek(fd, position, os.SEEK_SET)
        os.write(fd, content)


def fsync(path: Path) -> None:
    """Make a file, or a rename in a folder, survive a power failure. On Windows it does nothing for a folder."""
    if sys.platform == "win32" and path.is_dir():
        return
    fd = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def after_fork(call: Callable[[], object]) -> None:
    """Call ``call`` in each forked child of this process. There are none on Windows."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=call)
