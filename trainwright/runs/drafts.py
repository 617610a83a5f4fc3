"""Drafts: files that are written beside their target and renamed, and the removal of drafts that killed
processes left.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

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
    import psutil  # here: most commands find no drafts

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
    """Return a name of the machine, and of the container in it, whose process ids this process sees."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        namespace = ""
    return hashlib.blake2b(f"{socket.gethostname()} {namespace}".encode(), digest_size=4).hexdigest()
