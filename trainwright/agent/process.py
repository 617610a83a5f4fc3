"""Runs a Trainwright command in a separate process with limits on time and memory."""

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
"""Environment variable that marks all processes of a command. TRAINWRIGHT_... would be read as a setting."""
MAX_OUTPUT_BYTES = 2**22
MAX_WRITTEN_BYTES = 2**28
"""Maximum output of a process. It is stored on disk until the process ends."""
_PROGRAM = (
    "import sys; sys.argv[0] = 'trainwright'\n"
    "from trainwright.trials.child import end_with; end_with({parent})\n"
    "from trainwright.cli import main; main()"
)


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of one process: wall-clock time, and resident memory including its children."""

    seconds: float = 300.0
    memory_bytes: int = 8 * 2**30


def run_command(arguments: Sequence[str], folder: Path, limits: ProcessLimits) -> Mapping[str, Any]:
    """Run ``trainwright ARGUMENTS --json`` in ``folder``, and return the JSON object that it prints.

    Raises UsageError if the command reports an error, and TrainwrightError if it exceeded a limit or ended without a
    result.
    """
    import_paths = filter(None, (str(folder.absolute()), os.environ.get("PYTHONPATH")))
    mark = secrets.token_hex(16)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(import_paths), MARK: mark}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(parent=os.getpid()), *arguments, "--json"],
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
            _kill_all(process, mark)
        if exceeded:
            raise TrainwrightError(
                f"{arguments[0]} {exceeded} and was killed", remedy="start the server with larger --time or --memory"
            )
        result = _last_json_object(output)
        if result is None:
            raise TrainwrightError(
                f"{arguments[0]} ended with exit code {process.returncode} and no result: {_read_tail(errors)[-300:]}",
                remedy=f"run it in a terminal: trainwright {arguments[0]}",
            )
    if "error" in result and "exit" in result:
        raise UsageError(str(result["error"]))
    return result


def _wait(process: subprocess.Popen[bytes], limits: ProcessLimits, files: Sequence[IO[bytes]]) -> str:
    """Wait for a process. Returns a text on the limit that it exceeded, or ""."""
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


def _kill_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the process, its group, and processes that have left the group but have ``mark`` in their environment."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # also if it has ended, because its children may still run
    process.wait()
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if each.environ().get(MARK) == mark:
                each.kill()


def _last_json_object(output: IO[bytes]) -> Mapping[str, Any] | None:
    for line in reversed(_read_tail(output).splitlines()):
        if line.startswith("{"):
            with suppress(ValueError, RecursionError):
                found: Mapping[str, Any] = json.loads(line)
                return found
    return None


def _read_tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_OUTPUT_BYTES))
    return file.read().decode("utf-8", errors="replace").strip()
