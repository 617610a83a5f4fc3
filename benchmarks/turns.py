"""Processes that take turns, so that other load on the machine affects all alike."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


class TurnsOver(Exception):
    """Ends the training of a process whose parent requests no further turn."""


def wait_for_turn(answer: Any) -> None:
    """Sends a JSON value to the parent process, then waits for the next turn. Raises TurnsOver if there is none."""
    print(json.dumps(answer), file=sys.__stdout__, flush=True)
    if sys.stdin.readline().strip() != "go":
        raise TurnsOver


class Child:
    """A process of ``python -m MODULE --child ARGUMENTS``, which calls ``wait_for_turn`` between its turns."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", module, "--child", *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def answer(self) -> Any:
        """Waits until the current turn is over. Returns the value that the process sends."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{' '.join(map(str, self._process.args))} ended early")  # type: ignore[arg-type]
        return json.loads(line)

    def turn(self) -> Any:
        """Starts a turn, and returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
