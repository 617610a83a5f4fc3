"""Small file systems that tests fill, unmount or make read-only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(at: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory at a new folder, with options such as ``size=64k``, or skip the test."""
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False, capture_output=True)
