"""Training time to reach a validation loss: the demo recipe compared with nanoGPT's loop.

    python -m benchmarks.time_to_loss [--quick] [--seconds 60] [--pairs 1]

The plain loop (nanogpt.py) trains for ``--seconds`` and reaches the loss L. Then ``recipes/demo.yaml`` is trained with
rising time budgets until its loss is at most L. ``same_loss`` is its training time divided by that of the plain loop;
null if even the full time is too short. Pairs differ in their seeds.

Both losses are means over the full validation split in windows of 64 characters, in fp32, so both models have the same
context. Training time includes the batches, but not evaluation, saving and samples. Trainings are processes that run
one after the other.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import nanogpt
from benchmarks.figures import about, arguments, figure
from benchmarks.nanogpt import BLOCK
from benchmarks.processes import python
from trainwright.checkpoint.train_state import TrainState
from trainwright.commands.demo import TASKS
from trainwright.data.text import CharText, python_topics
from trainwright.engine.step import StepResult
from trainwright.monitoring.progress import Progress
from trainwright.recipe import load
from trainwright.recipe.load import builtin_recipes
from trainwright.runs.folder import RunFolder
from trainwright.training.job import Job
from trainwright.training.run import train

FRACTIONS = (1 / 8, 1 / 6, 1 / 5, 1 / 4, 1 / 3, 1 / 2.5, 1 / 2, 1 / 1.5)


class Trained(NamedTuple):
    """The result of one process: validation ``loss`` in nats per character after ``seconds`` of training."""

    loss: float
    seconds: float
    steps: int


def validation_loss(model: nn.Module, every: int) -> float:
    """Returns the mean loss over every ``every``-th window of 64 characters of the validation split, in fp32."""
    windows = python_topics("val", block_size=BLOCK)
    ids_NT, target_NT = windows.fetch_batch(np.arange(0, len(windows), every))
    model.eval()
    total = 0.0
    with torch.no_grad():
        for ids_BT, target_BT in zip(torch.split(ids_NT, 64), torch.split(target_NT, 64), strict=True):
            total += float(F.cross_entropy(model(ids_BT).flatten(0, 1), target_BT.flatten(), reduction="sum"))
    return total / target_NT.numel()


def train_plain(budget_s: float, seed: int, every: int) -> Trained:
    """Trains nanoGPT's loop on the same text."""
    torch.manual_seed(seed)
    text = python_topics("train", block_size=BLOCK)
    ids = torch.cat([text[number][0] for number in range(len(text))])  # the windows are consecutive
    model = nanogpt.NanoGPT(text.classes)
    steps, elapsed_s = nanogpt.train(model, ids, budget_s)
    return Trained(validation_loss(model, every), elapsed_s, steps)


class KeepJob:
    """An Observer that only keeps the job, for access to the trained model."""

    def __call__(self, job: Job, folder: RunFolder, progress: Progress) -> KeepJob:
        self.job = job
        return self

    def observe(self, result: StepResult, state: TrainState) -> None: ...
    def close(self) -> None: ...


def train_ours(budget_s: float, seed: int, every: int) -> Trained:
    """Trains the demo recipe as ``trainwright train`` does. Evaluates the averaged weights if it keeps an average."""
    kept = KeepJob()
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"until={budget_s!r}s", f"seed={seed}", f"folder={folder}"]
        settings += ["evaluation.every=1run", "evaluation.batches=1"]  # the loss is computed below instead
        train(load(builtin_recipes() / TASKS["text"], overrides=settings, environ={}), quiet=True, extras=[kept])
    parts, state = kept.job.parts, kept.job.state
    require_same_split(parts.train.dataset)
    require_same_split(parts.val.dataset if parts.val else None)
    with state.ema.swapped():
        return Trained(validation_loss(state.model, every), state.elapsed_s, state.step)


def require_same_split(data: Any) -> None:
    """Fails unless the recipe has the text and the split of the plain loop."""
    assert isinstance(data, CharText)
    same = python_topics(data.split, block_size=data.sample_tokens, stride=data.stride)
    assert data.content_sha256() == same.content_sha256(), "the recipe has another text or another split"


def train_here(side: str, budget_s: float, seed: int, threads: int, every: int) -> None:
    """Run one measurement in a separate process."""
    torch.set_num_threads(threads)
    print(json.dumps({"plain": train_plain, "ours": train_ours}[side](budget_s, seed, every)))


def trained(side: str, budget_s: float, *, seed: int, threads: int, every: int, quick: bool) -> Trained:
    """Trains in a new process and waits for it."""
    asked = f"{side!r}, {budget_s!r}, {seed}, {threads}, {every}"
    words = ["-c", f"from benchmarks import time_to_loss; time_to_loss.train_here({asked})"]
    printed = python(words, cwd=Path(__file__).parents[1], env=os.environ, forks=quick)
    seen = Trained(*json.loads(printed.splitlines()[-1]))
    print(f"{side:5} {seen.seconds:6.2f} s  {seen.steps:5} steps  loss {seen.loss:.4f}", file=sys.stderr, flush=True)
    return seen


def main() -> None:
    options = arguments(__doc__, seconds=(60.0, 8.0), pairs=(1, 1))
    about("time_to_loss")
    theirs: list[Trained] = []
    ours: list[Trained] = []
    reached: list[float] = []
    for number in range(options.pairs):
        how = {"seed": 1337 + number, "threads": options.threads, "every": 32 if options.quick else 1}
        how["quick"] = options.quick
        plain, full = trained("plain", options.seconds, **how), trained("ours", options.seconds, **how)
        theirs.append(plain)
        ours.append(full)
        shorter = (
            trained("ours", round(options.seconds * fraction, 3), **how)
            for fraction in (() if options.quick else FRACTIONS)
        )
        first = next((each for each in chain(shorter, [full]) if each.loss <= plain.loss), None)
        reached += [first.seconds / plain.seconds] if first else []
    all_reached = len(reached) == options.pairs
    figure("time_to_loss", "same_loss", reached if all_reached else [], unit="ratio", against="plain loop")
    figure("time_to_loss", "loss_plain", [each.loss for each in theirs], unit="nats", against="absolute")
    figure("time_to_loss", "loss_ours", [each.loss for each in ours], unit="nats", against="absolute")


if __name__ == "__main__":
    main()
