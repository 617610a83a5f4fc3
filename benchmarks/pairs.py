"""Starts two ranks as processes of a module, which receives its arguments as JSON and prints lines of JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

SPIN = "while True: pass"


def run_pair(module: str, ask: Mapping[str, Any], folder: Path, *, limit_s: float = 3600) -> list[list[dict[str, Any]]]:
    """Return the output of both ranks. Raises RuntimeError with the end of its stderr if one failed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    port = free_port()
    with ExitStack() as open_files:
        ranks = []
        for rank in (0, 1):
            out, err = (open_files.enter_context((folder / f"{name}{rank}").open("w")) for name in ("out", "err"))
            words = [sys.executable, "-m", module, json.dumps({**ask, "rank": rank, "port": port})]
            ranks.append(subprocess.Popen(words, stdout=out, stderr=err, env=environ))
        codes = [rank.wait(limit_s) for rank in ranks]
    if codes != [0, 0]:
        raise RuntimeError("\n".join((folder / f"err{rank}").read_text()[-1500:] for rank in (0, 1)))
    return [[json.loads(line) for line in (folder / f"out{rank}").read_text().splitlines()] for rank in (0, 1)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class Spinning:
    """Context in which ``count`` other processes keep the CPUs busy."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> None:
        self._processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(self._count)]

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
