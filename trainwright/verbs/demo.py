"""``demo``: trains a recipe that ships with the package, with samples of text meanwhile and a verdict at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trainwright.errors import UsageError
from trainwright.models.generate import generate
from trainwright.observe.progress import Progress
from trainwright.observe.samples import TextSamples
from trainwright.observe.terminal import Console
from trainwright.recipe import load
from trainwright.recipe.load import box
from trainwright.runlog.folder import RunFolder
from trainwright.training.job import Job
from trainwright.training.result import Result
from trainwright.training.run import train
from trainwright.world import Launch

TASKS = {"text": "demo.yaml", "digits": "demo-digits.yaml"}
PROMPT = "The "
SAMPLE_TOKENS = 160


def demo(
    task: str,
    *,
    budget: str,
    settings: list[str],
    console: Console | None = None,
    quiet: bool = False,
    begin_s: float | None = None,
) -> Result:
    """Trains the demo of ``task`` for ``budget`` (a duration). ``settings`` are overrides, ``path=value``.

    Seconds count from ``begin_s`` of ``time.perf_counter`` (None: now) to the end of the run, all included.
    """
    if task not in TASKS:
        raise UsageError(f"there is no demo {task!r}", remedy=f"choose one of: {', '.join(TASKS)}")
    if Launch.read(os.environ).size > 1:
        remedy = "train a recipe on several: trainwright train RECIPE -- --nproc-per-node 2"
        raise UsageError("the demo trains in one process, and torchrun has started several", remedy=remedy)
    begin_s = time.perf_counter() if begin_s is None else begin_s
    loaded = load(box() / TASKS[task], overrides=[f"until={budget}", *settings])
    if loaded.recipe.until.unit == "s":
        loaded = replace(loaded, end_s=begin_s + loaded.recipe.until.value)
    return train(loaded, console=console, quiet=quiet, extras=[text_samples] if task == "text" else [])


class _FinalToo(TextSamples):
    """Shows one more sample when the run has ended for any reason."""

    def close(self) -> None:
        self.show("the end")


def text_samples(job: Job, folder: RunFolder, progress: Progress) -> TextSamples:
    """Samples at the start, at 25 % and 50 %, and at the end of a run of a language model."""
    samples = _FinalToo(writer(job), folder=folder.samples, say=progress.say)
    if job.state.step == 0:
        samples.show("the start")
    return samples


def writer(job: Job) -> Callable[[], str]:
    """A function that lets the model of ``job`` continue a prompt, without changing its state."""
    data: Any = job.parts.train.dataset

    def write() -> str:
        prompt = torch.tensor([data.encode(PROMPT)], device=job.device)
        with job.precision.autocast():
            ids_BT = generate(job.state.model, prompt, tokens=SAMPLE_TOKENS, temperature=0.8)
        return str(data.decode(ids_BT[0]))

    return write
