"""``demo``: trains a recipe that ships with the package, with samples of text meanwhile and a verdict at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from trainwright.distributed import Launch
from trainwright.errors import UsageError
from trainwright.models.generate import generate
from trainwright.monitoring.progress import Progress
from trainwright.monitoring.samples import TextSamples
from trainwright.monitoring.terminal import Console
from trainwright.recipe import load
from trainwright.recipe.load import builtin_recipes
from trainwright.runs.folder import RunFolder
from trainwright.training.job import Job
from trainwright.training.result import Result
from trainwright.training.run import train

SAMPLE_SHARE = 0.01
"""Of the seconds of a demo: what a sample may take."""
LEAST_TOKENS = 16
"""A shorter sample says nothing: in the course of a run it is left out, at the end it is as long as this."""
TASKS = {"text": "demo.yaml", "digits": "demo-digits.yaml"}
PROMPT = "The "
SAMPLE_TOKENS, FIRST_TOKENS = 160, 48


def demo(
    task: str,
    *,
    budget: str,
    settings: list[str],
    console: Console | None = None,
    quiet: bool = False,
) -> Result:
    """Trains the demo of ``task`` for ``budget`` (a duration). ``settings`` are overrides, ``path=value``.

    Seconds count from the first step to the end of the run, all included: at least nine tenths of them are training.
    """
    if task not in TASKS:
        raise UsageError(f"there is no demo {task!r}", remedy=f"choose one of: {', '.join(TASKS)}")
    if Launch.read(os.environ).size > 1:
        remedy = "train a recipe on several: trainwright train RECIPE -- --nproc-per-node 2"
        raise UsageError("the demo trains in one process, and torchrun has started several", remedy=remedy)
    loaded = load(builtin_recipes() / TASKS[task], overrides=[f"until={budget}", *settings])
    if loaded.recipe.until.unit == "s":
        loaded = replace(loaded, within_s=loaded.recipe.until.value)
    return train(loaded, console=console, quiet=quiet, extras=[text_samples] if task == "text" else [])


class _FinalToo(TextSamples):
    """Shows one more sample when the run has ended for any reason."""

    def __init__(self, write: SampleWriter, *, folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(write, folder=folder, say=say)
        self._writer = write

    def close(self) -> None:
        self._writer.is_last = True
        self.show("the end")


def text_samples(job: Job, folder: RunFolder, progress: Progress) -> TextSamples:
    """Samples at the start, at 25 % and 50 %, and at the end of a run of a language model."""
    samples = _FinalToo(SampleWriter(job), folder=folder.samples, say=progress.say)
    if job.state.step == 0:
        samples.show("the start")
    return samples


class SampleWriter:
    """Lets the model of ``job`` continue a prompt, without changing its state.

    Where the seconds of the run are counted by the clock, a sample is as long as its share of them allows: by what a
    token of the one before has taken. It is empty where that is shorter than ``LEAST_TOKENS``, unless it ``is_last``.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._data = job, cast("Any", job.parts.train.dataset)
        self._token_s: float | None = None
        self.is_last = False

    def __call__(self) -> str:
        tokens = self._tokens()
        if tokens < LEAST_TOKENS:
            if not self.is_last:
                return ""
            tokens = LEAST_TOKENS
        prompt = torch.tensor([self._data.encode(PROMPT)], device=self._job.device)
        begin_s = time.perf_counter()
        with self._job.precision.autocast():
            ids_BT = generate(self._job.state.model, prompt, tokens=tokens, temperature=0.8)
        self._token_s = (time.perf_counter() - begin_s) / tokens
        return str(self._data.decode(ids_BT[0]))

    def _tokens(self) -> int:
        within_s = self._job.loaded.within_s
        if within_s is None or self._token_s is None:  # the first one comes before the first step
            return SAMPLE_TOKENS if within_s is None else FIRST_TOKENS
        return min(SAMPLE_TOKENS, int(SAMPLE_SHARE * within_s / self._token_s))
