"""Starts several ranks of one run with the environment of torchrun. The processes communicate over gloo."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.forked import Forked
from trainwright.checkpoint.stored import read_whole
from trainwright.checkpoint.tensor_file import open_tensors


def tensors_in(checkpoint: Path, *parts: str) -> dict[str, Tensor]:
    """Returns the full tensors of a checkpoint of any number of ranks, by name. Default: the weights."""
    return {
        name: read_whole(each) for part in parts or ("model",) for name, each in open_tensors(checkpoint, part).items()
    }


def start(code: str, ranks: int, *arguments: str, cwd: Path, attempt: int = 0, job: str = "test") -> list[Forked]:
    """Starts ``code`` in one process for each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    elastic = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_RUN_ID": job}
    return [
        Forked(code, *arguments, cwd=cwd, env={**shared, **elastic, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


def run(code: str, ranks: int, *arguments: str, cwd: Path, attempt: int = 0, timeout: float = 120) -> list[Forked]:
    """Runs ``code`` in one process for each rank until all have ended. A single rank gets no process group."""
    cwd.mkdir(exist_ok=True)
    if ranks == 1:
        started = [Forked(code, *arguments, cwd=cwd, env={"OMP_NUM_THREADS": "1"})]
    else:
        started = start(code, ranks, *arguments, cwd=cwd, attempt=attempt)
    for each in started:
        each.wait(timeout)
    return started


def finish(code: str, ranks: int, *arguments: str, cwd: Path, timeout: float = 120) -> list[Forked]:
    """Like ``run``. Fails unless every rank exits with 0."""
    done = run(code, ranks, *arguments, cwd=cwd, timeout=timeout)
    assert [each.returncode for each in done] == [0] * ranks, "\n".join(each.stderr[-2000:] for each in done)
    return done


def reports(code: str, ranks: int, *arguments: str, cwd: Path) -> list[Any]:
    """Returns the JSON in the last line that each rank prints."""
    return [json.loads(each.stdout.splitlines()[-1]) for each in finish(code, ranks, *arguments, cwd=cwd)]
