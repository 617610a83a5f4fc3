"""Opens a file of a run folder to read it: never by a link, which may lead to any file of this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 2**20
"""Of a recipe, a plan or a picture: larger ones are no run's."""


def open_to_read(path: Path) -> BinaryIO | None:
    """The file; None where there is none, or it may not be read, or it is something else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return os.fdopen(fd, "rb")


def text_of(path: Path, *, newest: bool = False) -> str:
    """The first MOST_BYTES of a file as text, or the ``newest``, at its end; "" where it cannot be opened."""
    file = open_to_read(path)
    if file is None:
        return ""
    with file:
        if newest:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
        return file.read(MOST_BYTES).decode("utf-8", errors="replace")
