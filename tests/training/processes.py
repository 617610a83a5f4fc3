"""A slow recipe, and the command line as a function call or as a process."""

from __future__ import annotations

import time
from pathlib import Path

from typer.testing import CliRunner

from tests.forked import COMMAND_LINE, Forked
from trainwright.cli import app
from trainwright.runs.reader import read
from trainwright.runs.records import Step

SLOWLY = """\
import time
import numpy as np, random, torch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.002)
        x = torch.linspace(0, index, 12) / 96 + 0.1 * torch.randn(12) + 0.1 * np.random.randn() + 0.1 * random.random()
        return x.float(), index % 3
"""
RECIPE = """\
name: slow
until: 60steps
model:
  use: mlp
  args: {sizes: [12, 24, 3], dropout: 0.2}
data:
  train: {use: "slowly:Slow"}
  workers: WORKERS
batch: {size: 8, micro: 4}
checkpoint: {every: 20steps}
log: {every: 5steps, doctor: false}
"""


def start(*arguments: str, cwd: Path, group: bool = False) -> Forked:
    """Start the command line in a process. Its stderr goes to stdout."""
    return Forked(COMMAND_LINE, *arguments, cwd=cwd, group=group, together=True)


def wait_for_step(log: Path, step: int, *, patience_s: float = 120.0) -> None:
    end_s = time.monotonic() + patience_s
    while time.monotonic() < end_s:
        if log.exists() and any(isinstance(r, Step) and r.step >= step for r in read(log).records):
            return
        time.sleep(0.05)
    raise AssertionError(f"{log} never saw step {step}")


def wait_for_file(path: Path, *, patience_s: float = 120.0) -> None:
    end_s = time.monotonic() + patience_s
    while not path.exists():
        assert time.monotonic() < end_s, f"there never was {path}"
        time.sleep(0.05)


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output
