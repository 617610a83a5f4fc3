"""``demo``: trains a built-in recipe, prints samples of text during training, and a verdict at the end."""

from __future__ import annotations

import os
import time
from dataclasses import replace
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

SAMPLE_TIME_FRACTION = 0.01
"""Maximum fraction of the time of a demo for one sample."""
MIN_SAMPLE_TOKENS = 16
"""Minimum length of a sample. During the run a shorter one is omitted; the last one is extended to it."""
TASKS = {"text": "demo.yaml", "digits": "demo-digits.yaml"}
PROMPT = "The "
SAMPLE_TOKENS = 160
FIRST_TOKENS = 48


def demo(task: str, *, budget: str, settings: list[str], console: Console | None = None) -> Result:
    """Train the demo of ``task`` for ``budget`` (a duration). ``settings`` are overrides, ``path=value``.

    Seconds count from the first step to the end of the run. At least nine tenths of them are training.
    """
    if task not in TASKS:
        raise UsageError(f"there is no demo {task!r}", remedy=f"choose one of: {', '.join(TASKS)}")
    if Launch.read(os.environ).size > 1:
        remedy = "train a recipe on several: trainwright train RECIPE -- --nproc-per-node 2"
        raise UsageError("the demo trains in one process, and torchrun has started several", remedy=remedy)
    loaded = load(builtin_recipes() / TASKS[task], overrides=[f"until={budget}", *settings])
    if loaded.recipe.until.unit == "s":
        loaded = replace(loaded, within_s=loaded.recipe.until.value)
    return train(loaded, console=console, extras=[text_samples] if task == "text" else [])


class _FinalToo(TextSamples):
    """Shows one more sample when the run ends."""

    _write: SampleWriter

    def close(self) -> None:
        self._write.is_last = True
        self.show("the end")


def text_samples(job: Job, folder: RunFolder, progress: Progress) -> TextSamples:
    """Return the observer that shows samples at the start, at 25 % and 50 %, and at the end of a language model run."""
    samples = _FinalToo(SampleWriter(job), folder=folder.samples, say=progress.say)
    if job.state.step == 0:
        samples.show("the start")
    return samples


class SampleWriter:
    """Lets the model of ``job`` continue a prompt, without changing its state.

    If the run has a time limit, a sample may take ``SAMPLE_TIME_FRACTION`` of it, at the time per token of the previous
    sample. A sample shorter than ``MIN_SAMPLE_TOKENS`` is empty, unless it ``is_last``.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._data = job, cast("Any", job.parts.train.dataset)
        self._token_s: float | None = None
        self.is_last = False

    def __call__(self) -> str:
        tokens = self._tokens()
        if tokens < MIN_SAMPLE_TOKENS:
            if not self.is_last:
                return ""
            tokens = MIN_SAMPLE_TOKENS
        prompt = torch.tensor([self._data.encode(PROMPT)], device=self._job.device)
        begin_s = time.perf_counter()
        with self._job.precision.autocast():
            ids_BT = generate(self._job.state.model, prompt, tokens=tokens, temperature=0.8)
        self._token_s = (time.perf_counter() - begin_s) / tokens
        return str(self._data.decode(ids_BT[0]))

    def _tokens(self) -> int:
        within_s = self._job.loaded.within_s
        if within_s is None or self._token_s is None:  # the first sample is before the first step
            return SAMPLE_TOKENS if within_s is None else FIRST_TOKENS
        return min(SAMPLE_TOKENS, int(SAMPLE_TIME_FRACTION * within_s / self._token_s))
