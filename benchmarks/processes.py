"""Starts a Python process for each run that a benchmark compares."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn


class Started:
    """A process that runs ``python ARGUMENTS``, in ``cwd`` and with ``env``.

    ``forks``: the process is forked from this one, which has imported most modules already. For ``--quick``, where the
    imports would take longer than the runs.
    """

    def __init__(self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], forks: bool) -> None:
        self._arguments, self._forks = arguments, forks
        self._folder = tempfile.TemporaryDirectory(prefix="printed-")
        self._outputs = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        fds = [os.open(path, os.O_WRONLY | os.O_CREAT) for path in self._outputs]
        if forks:
            sys.stdout.flush()
            self._pid = os.fork()
            if not self._pid:
                _become(arguments, cwd, env, fds)
        else:
            command = [sys.executable, *arguments]
            self._process = subprocess.Popen(command, cwd=cwd, env=env, stdout=fds[0], stderr=fds[1])
        for fd in fds:
            os.close(fd)

    def output(self) -> str:
        """Wait for the end and return stdout. Raises SystemExit with its stderr if it failed."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]) if self._forks else self._process.wait()
        printed, errors = (path.read_text() for path in self._outputs)
        self._folder.cleanup()
        if code:
            raise SystemExit(f"python {' '.join(self._arguments)} failed ({code}):\n{errors[-3000:]}")
        return printed


def python(arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], forks: bool) -> str:
    """Run ``python ARGUMENTS`` to its end and return stdout."""
    return Started(arguments, cwd=cwd, env=env, forks=forks).output()


def _become(arguments: Sequence[str], cwd: Path, env: Mapping[str, str], fds: Sequence[int]) -> NoReturn:
    """Runs ``python ARGUMENTS`` in the forked process. Never returns."""
    code = 1
    try:
        for number, fd in enumerate(fds, 1):
            os.dup2(fd, number)
        os.environ.update(env)
        os.chdir(cwd)
        words = list(arguments[2:] if arguments[0] == "-W" else arguments)
        how, what, *rest = words
        sys.argv = [what, *rest]
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:  # for example of ``--help``
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
