"""A small training to be started and killed: its recipe, its dataset, and its processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

PATIENCE_S = 12.0

DATASET = '''
import random, time
import numpy as np, torch

class Noisy(torch.utils.data.Dataset):
    """Every sample is augmented with numbers from all three global generators."""

    def __init__(self, size, step_ms):
        self.size, self.seconds = size, step_ms / 1000 / 8

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.seconds)
        x = torch.linspace(-1, index / 53, 64) + 0.1 * torch.randn(64) + 0.1 * np.random.randn() + 0.1 * random.random()
        return x.float(), index % 8
'''

RECIPE = """
until: {steps}steps
device: cpu
precision: fp32
model: {{use: mlp, args: {{sizes: [64, 320, 320, 8], dropout: 0.2}}, ema: 0.95}}
data:
  train: {{use: "noisy:Noisy", args: {{size: 53, step_ms: {step_ms}}}}}
  val: {{use: "noisy:Noisy", args: {{size: 16, step_ms: 0}}}}
  workers: {workers}
batch: {{size: 8, micro: 4}}
optimizer: {{use: adamw, lr: 1e-3, weight_decay: 0.1, decay_norms_and_biases: false, clip: {{by: norm, at: 1.0}}}}
schedule: {{use: cosine, warmup: 0.1run}}
evaluation: {{every: 10steps, batches: 2}}  # all, also where a slow machine has time for fewer
checkpoint: {{every: 1steps, at_least_every: null, keep: {keep}}}
parallel: {parallel}
log: {{every: 1steps, doctor: false}}
"""


class Running(Protocol):
    """A training in one or several processes."""

    def kill(self) -> None: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...


class Forked:
    """Like subprocess.Popen, for a forked child that needs no imports."""

    def __init__(self, arguments: list[str], folder: Path, said: Path, environ: Mapping[str, str] = {}) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(environ)
            _become_trainwright(arguments, folder, said)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self) -> int:
        code = self._waited(0)
        assert code is not None
        return code

    def _waited(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Ranks:
    """Several forked ranks of one training. ``kill`` kills half of them, drawn at random, all at once."""

    def __init__(self, arguments: list[str], folder: Path, said: Path, ranks: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._ranks = [
            Forked(
                arguments,
                folder,
                said if rank == 0 else said.with_suffix(f".{rank}.txt"),
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]

    def kill(self) -> None:
        for each in random.sample(self._ranks, len(self._ranks) // 2):
            each.kill()

    def poll(self) -> int | None:
        codes = [each.poll() for each in self._ranks]
        return None if None in codes else _together([code for code in codes if code is not None])

    def wait(self) -> int:
        """Returns -SIGKILL if a rank was killed. The others then fail, or are killed after PATIENCE_S."""
        while any(each.poll() is None for each in self._ranks):
            if any(each.poll() is not None for each in self._ranks):
                self._end_others()
                break
            time.sleep(0.05)
        return _together([each.wait() for each in self._ranks])

    def _end_others(self) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while any(each.poll() is None for each in self._ranks) and time.monotonic() < end_s:
            time.sleep(0.05)
        for each in self._ranks:
            if each.poll() is None:
                each.kill()


def _together(codes: list[int]) -> int:
    return min(codes) if min(codes) < 0 else max(codes)


def _become_trainwright(arguments: list[str], folder: Path, said: Path) -> None:
    """Runs the command line in the forked child. Never returns."""
    code = 1
    try:
        to = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(to, 1)
        os.dup2(to, 2)
        os.chdir(folder)
        sys.argv = ["trainwright", *arguments]
        multiprocessing.set_start_method(None, force=True)  # the default of the platform, not that of the parent's pool
        from trainwright.cli import app

        app(standalone_mode=True)
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass
class Place:
    """The folder of one job: recipe and dataset in ``folder``, runs in ``folder/runs``, output in ``said``."""

    folder: Path
    fork: bool = False
    ranks: int = 1
    said: Path = field(init=False)

    def __post_init__(self) -> None:
        self.said = self.folder / "said.txt"

    def make(self, *, steps: int, workers: int, step_ms: float, keep: int, parallel: str = "{}") -> None:
        """Writes recipe and dataset. ``step_ms``: time to read a batch. ``parallel``: that section of the recipe."""
        self.folder.mkdir(parents=True)
        (self.folder / "noisy.py").write_text(DATASET)
        recipe = RECIPE.format(steps=steps, workers=workers, step_ms=step_ms, keep=keep, parallel=parallel)
        (self.folder / "campaign.yaml").write_text(recipe)

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def train(self, name: str, *settings: str) -> Running:
        options = [word for each in (f"name={name}", *settings) for word in ("--set", each)]
        return self._start("train", "campaign.yaml", *options)

    def resume(self, name: str, *options: str) -> Running:
        return self._start("resume", f"runs/{name}", *options)

    def _start(self, *arguments: str) -> Running:
        if self.ranks > 1:
            return Ranks([*arguments], self.folder, self.said, self.ranks)
        if self.fork:
            return Forked([*arguments], self.folder, self.said)
        command = [sys.executable, "-m", "trainwright", *arguments]
        with self.said.open("w") as said:
            return subprocess.Popen(command, cwd=self.folder, stdout=said, stderr=subprocess.STDOUT)


@contextmanager
def watched(process: Running) -> Iterator[Running]:
    """Context that kills the process at its end."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def end_orphans(folder: Path) -> int:
    """Kills processes that run in ``folder`` after PATIENCE_S, and returns their number. torch's workers end in 5 s."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(folder):
                found.append(process)
    _, living = psutil.wait_procs(found, timeout=PATIENCE_S)
    for process in living:
        process.kill()
    return len(living)
