"""Writes files of a run folder atomically, and converts operating-system errors to a StorageError with a remedy."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import socket
import stat
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from trainwright.errors import StorageError
from trainwright.runs.system_calls import fsync, open_file

_NAME = re.compile(r"\..+\.(?P<pid>[1-9]\d{0,8})-(?P<place>[0-9a-f]{8})\.draft")
_ABANDONED_AGE_S = 24 * 3600.0
"""Age in seconds at which a draft of another machine or container, whose processes cannot be seen, is abandoned."""


def draft_of(path: Path) -> Path:
    """Return the path where this process writes ``path`` before renaming it."""
    return path.with_name(f".{path.name}.{os.getpid()}-{_place()}.draft")


def remove_leftovers(folder: Path) -> None:
    """Remove the drafts in ``folder`` of processes that no longer exist. Never raises."""
    with suppress(OSError):
        for path in folder.glob(".*.draft"):
            if _is_abandoned(path):
                remove(path)


def _is_abandoned(path: Path) -> bool:
    found = _NAME.fullmatch(path.name)
    if found is None:
        return False
    if found["place"] == _place():
        return not _is_alive(int(found["pid"]))
    with suppress(OSError):
        return time.time() - max(each.lstat().st_mtime for each in (path, *path.rglob("*"))) > _ABANDONED_AGE_S
    return False


def _is_alive(pid: int) -> bool:
    import psutil  # imported here, because most commands find no drafts

    return psutil.pid_exists(pid)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content. Never raises."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@cache
def _place() -> str:
    """Return a name for the machine, or the container in it, within which process ids are unique."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        namespace = ""
    return hashlib.blake2b(f"{socket.gethostname()} {namespace}".encode(), digest_size=4).hexdigest()


_MEANING = {
    errno.ENOSPC: (
        "the disk is full",
        "free space on that disk, or start the run in a folder on another one",
    ),
    getattr(errno, "EDQUOT", -1): (
        "your disk quota is used up",
        "free space, or start the run in a folder on another disk",
    ),
    errno.EFBIG: ("the file would exceed the size limit", "raise the limit (ulimit -f)"),
    errno.EACCES: ("permission denied", "choose a folder that you may write, or change its permissions"),
    errno.EPERM: ("permission denied", "choose a folder that you may write, or change its permissions"),
    errno.EROFS: ("the file system is read-only", "choose a folder on a disk that may be written"),
    errno.ENOENT: ("the folder does not exist", "restore the folder, or start the run in another one"),
    errno.ENOTDIR: ("a part of the path is a file", "choose another folder, or move that file away"),
    errno.EEXIST: ("a file is in the way", "choose another folder, or move that file away"),
    errno.EISDIR: ("a folder is in the way", "choose another name, or move that folder away"),
    errno.EIO: (
        "the disk reports a hardware or network error",
        "check the disk (dmesg) or the network mount",
    ),
    getattr(errno, "ESTALE", -2): ("the network mount has gone stale", "mount it again"),
    errno.ELOOP: ("it is a symbolic link", "remove that link: a run writes only to its own files"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter name"),
}


def storage_error(error: OSError, path: Path, doing: str) -> StorageError:
    """Return the error to raise when ``doing`` (a verb such as "write") failed on ``path``."""
    what, remedy = _MEANING.get(error.errno or 0, (error.strerror or str(error), "check the disk and the path"))
    return StorageError(f"cannot {doing} {path}: {what}", remedy=remedy)


def open_for_writing(path: Path, flags: int) -> int:
    """Open or create a file of a run folder for writing, and return its descriptor. No link is followed.

    Raises OSError. Raises StorageError for what is not a file (a device such as /dev/null is allowed) or has another
    hard link, because writes would reach a file elsewhere.
    """
    fd = open_file(path, flags | os.O_CREAT)
    seen = os.fstat(fd)
    is_file = stat.S_ISREG(seen.st_mode) or stat.S_ISCHR(seen.st_mode)
    if is_file and seen.st_nlink <= 1:
        return fd
    os.close(fd)
    if not is_file:
        raise StorageError(f"cannot write {path}: it is not a regular file", remedy="move it away")
    raise StorageError(
        f"cannot write {path}: it is a hard link, so another file would be written too",
        remedy=f"make it a separate file: cp {path} {path}.new && mv {path}.new {path}",
    )


def make_subfolder(path: Path) -> None:
    """Make a folder inside of a run folder. Raises OSError, and StorageError if there is a link in its place.

    A link may lead anywhere: in a foreign run folder, to a folder of the user. Checkpoints, which are large, are the
    exception: their folder may be a link to another disk.
    """
    path.mkdir(exist_ok=True)
    if path.is_symlink():
        raise StorageError(
            f"cannot write into {path}: it is a symbolic link",
            remedy="remove that link",
        )


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a complete text file. Raises StorageError. A ``durable`` file survives a power failure.

    A link in the place of the file or of its draft is replaced and not followed.
    """
    draft = draft_of(path)
    try:
        draft.unlink(missing_ok=True)  # left by an earlier process with the same id
        with draft.open("x", encoding="utf-8", newline="\n") as file:  # follows no link
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
        if durable:
            fsync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise storage_error(error, path, "write") from error


def write_output(path: Path, text: str, option: str) -> None:
    """Write the text file that the user named with ``option``. A link is followed. Raises StorageError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}", remedy=f"give another {option}") from None


def deleted_error(path: Path) -> StorageError:
    """Return the error for a file that was deleted while it was open: writes to it would succeed and be lost."""
    return StorageError(
        f"cannot write {path}: the file or its folder was deleted while the run was writing to it",
        remedy="resume from the newest checkpoint that is left, or start the run in another folder",
    )
