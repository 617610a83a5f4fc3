"""Compares each ``auto`` with the best fixed value: a decision of the plan must not cost more than 3 % of a step.

    python -m benchmarks.auto [--recipes gpt-tiny,lstm-text] [--settings precision,compile] [--rounds 7] [--threads 2]
        [--after FILE] [--quick]

For each included recipe, one run has every setting at ``auto``. For each other value of a setting, one run differs from
it in that setting only. All runs train in one process, in alternating blocks. A figure is the time of a step with
``auto`` divided by that of the fastest other value in the same round: at 1.03 ``auto`` is 3 % slower, below 1 it is the
fastest. The value that ``auto`` chose is not measured again.

    precision   fp32, bf16 (on a CPU, auto chooses bf16 if one thread does forward and backward pass in it at least 3 %
                faster)
    update      the implementation of the optimizer: fused, foreach, or one tensor at a time
    chunked     the loss of a language model in chunks: true, false
    compile     off, the full model, its blocks
    layout      memory layout of the weights of convolutions: contiguous, channels-last
    threads     every power of two up to the number of cores

With ``--threads 1`` all runs have one thread, the setting ``threads`` is left out, and the processor time of that
thread is measured. Other processes hardly affect it, so use this option on a busy machine.

There is no ``auto`` for ``compile`` and ``layout``: compile is off unless the recipe sets it, and weights keep the
layout of the model (``trainwright profile`` measures both). Their figures show the cost of these defaults in a step,
without the time to compile, which is printed. ``--after FILE`` continues an interrupted run and leaves out the recipes
whose figures are in FILE: ``python -m benchmarks.auto --after figures.jsonl >> figures.jsonl``.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import about, arguments, figure, interleaved
from trainwright.engine.loop import for_steps, steps
from trainwright.errors import TrainwrightError, UsageError
from trainwright.plan.parallel import in_one_process
from trainwright.recipe import load
from trainwright.training.job import Job, make_advance
from trainwright.training.prepare import prepare
from trainwright.training.run import process_settings

RECIPES = Path(__file__).parent.parent / "recipes"
NAMES = (
    "gpt-tiny,lstm-text,moe-text,bert-text,demo,demo-digits,vit-digits,vit-shapes,resnet-digits,unet-shapes,"
    "gpt-lora,hf-lora,llama-7b"
)
"""All but gpt2-124m, whose copies take 12 GiB, and reinforce-cartpole, whose steps are as long as its episodes."""
_SHORT = [f"{key}.args.block_size=64" for key in ("model", "data.train", "data.val")]
SMALL_FORMS: Mapping[str, Sequence[str]] = {
    "llama-7b": ["batch.size=2", *(f"model.args.{key}" for key in ("layers=2", "heads=2", "d_model=32")), *_SHORT],
}
"""Overrides with which recipes for a larger device fit into the memory of a small machine."""
SETTINGS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "precision": {"fp32": ["precision=fp32"], "bf16": ["precision=bf16"]},
    "update": {
        "fused": ["optimizer.args.fused=true"],
        "foreach": ["optimizer.args.foreach=true"],
        "one by one": ["optimizer.args.foreach=false", "optimizer.args.fused=false"],
    },
    "chunked": {"true": ["loss.chunked=true"], "false": ["loss.chunked=false"]},
    "compile": {"full": ["model.compile=true"], "blocks": ["model.compile=blocks"]},
    "layout": {"channels-last": []},
}
"""Overrides by setting and value."""
EVERY = (*SETTINGS, "threads")
AUTO = ("log.doctor=false", "precision=auto")
WARM_UP_STEPS = 3
BLOCK_S = 0.15


@dataclass
class Run:
    """A live run of a recipe, advanced block by block."""

    job: Job
    threads: int
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._results = steps(self.job.state, self.job.batches, make_advance(self.job), until=for_steps(10**9))
        self._count = 1

    def warm(self) -> None:
        """Trains the first steps, which compile."""
        self._advance(WARM_UP_STEPS)

    def settle(self, block_s: float) -> None:
        """Chooses the length of a block."""
        self.warm()
        self._count = max(1, round(block_s / self._advance(2)))

    def __call__(self) -> float:
        """Trains a block. Returns the mean time of a step in seconds."""
        return self._advance(self._count)

    def _advance(self, count: int) -> float:
        self.job.matmul.set()
        torch.set_num_threads(self.threads)
        begin_s = self.clock()
        for _ in islice(self._results, count):
            pass
        return (self.clock() - begin_s) / count


def job_of(name: str, overrides: Sequence[str] = ()) -> Job:
    given = [*AUTO, *SMALL_FORMS.get(name, ()), *overrides]
    return prepare(in_one_process(load(RECIPES / f"{name}.yaml", overrides=given)))


def channels_last(job: Job) -> Job:
    """Returns the job with the weights of its convolutions channels-last. Raises UsageError if it has none."""
    if not any(isinstance(each, torch.nn.Conv2d) for each in job.state.model.modules()):
        raise UsageError("the model has no convolution")
    job.state.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return job


def chosen(job: Job) -> dict[str, str]:
    """Returns the values that ``auto`` chose. Chunked loss: a limit above the planned memory counts as ``false``."""
    group, planned_bytes = job.state.optimizer.param_groups[0], job.plan.predicted.memory_bytes or {}
    limit: Any = (job.plan.settled or {}).get("max_logits_bytes")
    return {
        "precision": job.plan.precision,
        "update": next((name for name in ("fused", "foreach") if group.get(name)), "one by one"),
        "chunked": "false" if limit is None or limit > sum(planned_bytes.values()) else "true",
        "compile": "off",
        "layout": "contiguous",
        "threads": str(job.plan.threads),
    }


def others(name: str, auto: Run, taken: Mapping[str, str], settings: Sequence[str]) -> dict[str, dict[str, Run]]:
    """Returns a run for each value that ``auto`` did not choose, by setting."""
    found: dict[str, dict[str, Run]] = {}
    for setting in (each for each in SETTINGS if each in settings):
        for value, overrides in SETTINGS[setting].items():
            if value == taken[setting]:
                continue
            try:
                job = channels_last(job_of(name)) if setting == "layout" else job_of(name, overrides)
                run = Run(job, auto.threads, auto.clock)
                begin_s = time.perf_counter()
                run.warm()
                if setting == "compile":
                    print(f"{name}: {value} compiled in {time.perf_counter() - begin_s:.3g} s", file=sys.stderr)
                found.setdefault(setting, {})[value] = run
            except (TrainwrightError, TypeError, RuntimeError) as error:  # the recipe lacks it, or it does not compile
                print(f"{name}: no {setting} {value}: {' '.join(str(error).split())[:160]}", file=sys.stderr)
    if auto.clock is time.thread_time or "threads" not in settings:
        return found
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for count in [1 << power for power in range(cores.bit_length())]:
        if count != auto.threads:
            found.setdefault("threads", {})[str(count)] = Run(job_of(name), count, auto.clock)
    return found


def measure(name: str, settings: Sequence[str], rounds: int, block_s: float, *, one_thread: bool) -> None:
    """Prints the time with ``auto`` relative to the best other value, for each setting."""
    job = job_of(name)
    auto = Run(job, 1, time.thread_time) if one_thread else Run(job, job.plan.threads, time.perf_counter)
    taken = chosen(job)
    runs = others(name, auto, taken, settings)
    blocks: dict[tuple[str, str], Run] = {("auto", ""): auto}
    blocks |= {(setting, value): run for setting, values in runs.items() for value, run in values.items()}
    for run in blocks.values():
        run.settle(block_s)
    gc.collect()
    gc.freeze()  # each block begins with a garbage collection, which would scan all of these runs
    named: dict[str, Callable[[], float]] = {" ".join(key): run for key, run in blocks.items()}
    seen = dict(zip(blocks, interleaved(named, rounds).values(), strict=True))
    for setting, values in runs.items():
        best = min(values, key=lambda value: sorted(seen[setting, value])[rounds // 2])
        ratios = [ours / other for ours, other in zip(seen["auto", ""], seen[setting, best], strict=True)]
        against = f"{best}, the best of {len(values)} others; auto took {taken[setting]}"
        figure("auto", f"{name}_{setting}", ratios, unit="ratio", against=against)


def main() -> None:
    options = arguments(
        __doc__,
        recipes=(NAMES, "gpt-tiny"),
        settings=(",".join(EVERY), "precision,update,layout"),
        rounds=(7, 1),
        after=("", ""),
    )
    before, done = Path.cwd(), Path(options.after).read_text() if options.after else ""
    if not done:
        about("auto")
    with tempfile.TemporaryDirectory(prefix="auto-") as folder, process_settings():
        os.chdir(folder)
        try:
            for name in options.recipes.split(","):
                if f'"case": "{name}_' not in done:
                    block_s = 0.01 if options.quick else BLOCK_S
                    measure(name, options.settings.split(","), options.rounds, block_s, one_thread=options.threads == 1)
        finally:
            os.chdir(before)


if __name__ == "__main__":
    main()
