"""Processes that need not import torch: each is forked from a process that has imported it once per session.

A forked process has its own memory, signals and exit code, and starts in a tenth of the time of a new Python. Tests of
the start and the end of a verb use a new Python.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import IO

from trainwright.commands.verify.trial import TrialPart
from trainwright.trials import trial
from trainwright.watching.budget import DOCTOR_VARIABLE

CONTEXT: ForkServerContext | ForkContext = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.warm"])
get_temp_dir()  # creates the folder of its socket, before a test redirects temporary files to its own folder
COMMAND_LINE = "from trainwright.cli import main; main()"
FORKING_TRIALS = f"from tests import forked; forked.fork_trials(); {COMMAND_LINE}"
"""The command line in a forked process that forks the processes of its trials."""


class Forked:
    """A process that runs ``code``, with the methods of ``subprocess.Popen`` that tests need.

    ``group``: the process leads a new process group. ``together``: stderr goes to stdout. ``outputs``: files to which
    stdout and stderr are appended.
    """

    def __init__(
        self,
        code: str,
        *arguments: str,
        cwd: Path | None = None,
        env: Mapping[str, str] = {},
        group: bool = False,
        together: bool = False,
        outputs: Sequence[Path] = (),
    ) -> None:
        self._leads, self._printed = group, Path(tempfile.mkdtemp(prefix="forked-"))
        outputs = outputs or [self._printed / name for name in ("stdout", "stdout" if together else "stderr")]
        doctor = {
            DOCTOR_VARIABLE: os.environ.get(DOCTOR_VARIABLE, "")
        }  # the fork server may have the value of an earlier test
        self._process: BaseProcess = CONTEXT.Process(
            target=_run, args=(code, arguments, list(outputs), cwd or Path.cwd(), {**doctor, **env}, group)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        AT_THE_END.append(self.end)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def stdout(self) -> str:
        return _text(self._printed / "stdout")

    @property
    def stderr(self) -> str:
        return _text(self._printed / "stderr")

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = 240) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout, self.stdout, self.stderr)
        return self._process.exitcode

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        self.wait(timeout)
        return self.stdout, self.stderr

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kills the process and its group if they still run, and deletes the captured output. May be called again."""
        if self._leads and self.poll() is None:
            with suppress(ProcessLookupError):  # the process has not created its group yet
                os.killpg(self.pid, signal.SIGKILL)
        self.kill()
        self.wait()
        shutil.rmtree(self._printed, ignore_errors=True)


class ForkedCommand(Forked):
    """Replaces ``subprocess.Popen`` in ``trainwright.trials.trial``. File descriptors are not inherited."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        start_new_session: bool,
        env: Mapping[str, str],
        pass_fds: Iterable[int] = (),
        cwd: Path | None = None,
    ) -> None:
        paths = "import os, sys; sys.path[:0] = os.environ['PYTHONPATH'].split(os.pathsep)\n"
        code = paths + re.sub(r"end_with\(\d+\)", "end_with(os.getppid())", command[2])
        outputs = [  # an unnamed file is opened by its descriptor; the caller keeps it open until the command has ended
            Path(each.name if isinstance(each.name, str) else f"/proc/{os.getpid()}/fd/{each.fileno()}")
            for each in (stdout, stderr)
        ]
        super().__init__(code, *command[3:], cwd=cwd, env=env, group=start_new_session, outputs=outputs)


FORKING = types.SimpleNamespace(
    DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired, Popen=ForkedCommand
)
"""Replaces ``subprocess`` in ``trainwright.trials.trial``."""


def fork_trials() -> None:
    """Called in a forked process, so that processes of trials are forked from it and not from the fork server."""
    global CONTEXT
    CONTEXT = multiprocessing.get_context("fork")
    vars(trial)["subprocess"] = FORKING


AT_THE_END: list[Callable[[], object]] = []
"""Functions that end the processes of the current test."""


def run(
    code: str, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] = {}, timeout: float = 240
) -> Forked:
    """Like ``subprocess.run([sys.executable, "-c", code, *arguments])``, in a forked process."""
    process = Forked(code, *arguments, cwd=cwd, env=env)
    process.wait(timeout)
    return process


def run_part(part: TrialPart, output: Path, environment: Mapping[str, str]) -> int:
    """Like ``verify.resume.in_new_python``, in a forked process."""
    code = "from trainwright.commands.verify.trial import main; main()"
    process = Forked(code, json.dumps(asdict(part)), env=environment, together=True)
    code_of_exit = process.wait()
    output.write_text(process.stdout)
    process.end()
    return code_of_exit


def end_all() -> None:
    """Ends all processes of the current test, also if it failed."""
    while AT_THE_END:
        AT_THE_END.pop()()


def _run(
    code: str, arguments: tuple[str, ...], outputs: list[Path], cwd: Path, env: dict[str, str], group: bool
) -> None:
    gc.freeze()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a process that is forked by a sweep inherits the sweep's handler
    multiprocessing.set_start_method("fork", force=True)  # the default of a new Python on Linux
    if group:
        os.setsid()
    os.environ.update(env)
    os.chdir(cwd)
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv, sys.path = ["-c", *arguments], [str(cwd), *sys.path]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(main))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
