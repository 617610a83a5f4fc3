"""Runs a Trainwright command in a process of its own, bounded in time and memory."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from trainwright.errors import TrainwrightError, UsageError

POLL_S = 0.5
MARK = "COMMAND_OF_TRAINWRIGHT"
"""The environment variable by which all processes of a command are known; TRAINWRIGHT_... would be a setting."""
MAX_OUTPUT_BYTES = 2**22
MAX_WRITTEN_BYTES = 2**28
"""What a process may print: it lies on the disk until the process ends."""
_PROGRAM = (
    "import sys; sys.argv[0] = 'trainwright'\n"
    "from trainwright.trials.child import end_with; end_with({parent})\n"
    "from trainwright.cli import main; main()"
)


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of one process: wall-clock seconds, and bytes of resident memory of it and its children."""

    seconds: float = 300.0
    memory_bytes: int = 8 * 2**30


def run_command(words: Sequence[str], folder: Path, limits: ProcessLimits) -> Mapping[str, Any]:
    """Run ``trainwright WORDS --json`` in ``folder``, and return the object that it prints.

    Raises:
        UsageError: The command reports an error.
        TrainwrightError: It exceeded a limit, or ended without a result.
    """
    beside = filter(None, (str(folder.absolute()), os.environ.get("PYTHONPATH")))
    mark = secrets.token_hex(16)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(beside), MARK: mark}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(parent=os.getpid()), *words, "--json"],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            exceeded = _wait(process, limits, (output, errors))
        finally:
            _end(process, mark)
        if exceeded:
            raise TrainwrightError(
                f"{words[0]} {exceeded} and was ended", remedy="start the server with larger --time or --memory"
            )
        result = _last_object(output)
        if result is None:
            raise TrainwrightError(
                f"{words[0]} ended with exit code {process.returncode} and no result: {_end_of(errors)[-300:]}",
                remedy="run the command by hand",
            )
    if "error" in result and "exit" in result:
        raise UsageError(str(result["error"]))
    return result


def _wait(process: subprocess.Popen[bytes], limits: ProcessLimits, files: Sequence[IO[bytes]]) -> str:
    """Wait for the end of a process. Returns the limit that it exceeded, or ""."""
    until_s = time.monotonic() + limits.seconds
    while process.poll() is None:
        if time.monotonic() > until_s:
            return f"took more than {limits.seconds:g} s"
        if _resident_bytes(process.pid) > limits.memory_bytes:
            return f"used more than {limits.memory_bytes / 2**30:.3g} GiB"
        if sum(os.fstat(each.fileno()).st_size for each in files) > MAX_WRITTEN_BYTES:
            return f"printed more than {MAX_WRITTEN_BYTES / 2**20:.0f} MiB"
        time.sleep(POLL_S)
    return ""


def _resident_bytes(pid: int) -> int:
    total = 0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for each in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the process and all that it started, also what has left its session but still has ``mark``."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # also if it ended: its children may still run
    process.wait()
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if each.environ().get(MARK) == mark:
                each.kill()


def _last_object(output: IO[bytes]) -> Mapping[str, Any] | None:
    for line in reversed(_end_of(output).splitlines()):
        if line.startswith("{"):
            with suppress(ValueError, RecursionError):
                found: Mapping[str, Any] = json.loads(line)
                return found
    return None


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT_BYTES))
    return file.read().decode("utf-8", errors="replace").strip()
