"""Each ``auto`` against the best setting by hand: a decision of the plan must not cost more than 3 % of a step.

    python -m benchmarks.auto [--recipes gpt-tiny,lstm-text] [--rounds 9] [--seconds 200] [--quick]

For each recipe of the box and each setting that may be left open, the runs with ``auto`` and with every explicit value
train in one process, in blocks that take turns. A figure is the time of a step with ``auto`` divided by that of the
fastest explicit value in the same round: 1.03 is 3 % slower. ``NAME_precision_chosen`` has the value
that ``auto`` chose.

    precision   auto, fp32, bf16 (auto takes bf16 only if it is 1.3 times as fast, because it changes the numbers)
    update      the planned implementation of the optimizer, fused, foreach, and one tensor at a time
    chunked     the loss of a language model: auto, true, false
    threads     those of the plan, and every smaller and larger power of two that the machine has

There is no ``auto`` for ``model.compile`` and for channels-last: both are off unless the recipe asks for them
(``trainwright profile`` measures them). No recipe begins after ``--seconds``.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from benchmarks.figures import about, arguments, figure, interleaved
from trainwright.engine.loop import for_steps, steps
from trainwright.errors import TrainwrightError
from trainwright.plan.parallel import in_one_process
from trainwright.recipe import load
from trainwright.training.job import Job, make_advance, prepare
from trainwright.training.run import process_settings

RECIPES = Path(__file__).parent.parent / "recipes"
NAMES = "gpt-tiny,lstm-text,moe-text,bert-text,demo-digits,vit-digits,resnet-digits,unet-shapes"
SETTINGS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "precision": {"auto": ["precision=auto"], "fp32": ["precision=fp32"], "bf16": ["precision=bf16"]},
    "update": {
        "auto": [],
        "fused": ["optimizer.args.fused=true"],
        "foreach": ["optimizer.args.foreach=true"],
        "one_by_one": ["optimizer.args.foreach=false", "optimizer.args.fused=false"],
    },
    "chunked": {"auto": ["loss.chunked=auto"], "true": ["loss.chunked=true"], "false": ["loss.chunked=false"]},
}
"""Overrides by setting and value."""
COMMON = ("log.doctor=false",)
WARM_UP_STEPS = 5
BLOCK_S = 0.15


@dataclass
class Run:
    """A live run of a recipe, advanced block by block."""

    job: Job
    threads: int

    def __post_init__(self) -> None:
        self._results = steps(self.job.state, self.job.batches, make_advance(self.job), until=for_steps(10**9))
        self._count = 1

    def settle(self, block_s: float) -> None:
        """Chooses the length of a block."""
        self._advance(WARM_UP_STEPS)
        self._count = max(1, round(block_s / self._advance(2)))

    def __call__(self) -> float:
        """Trains a block; returns the seconds of a step."""
        return self._advance(self._count)

    def _advance(self, count: int) -> float:
        self.job.matmul.set()
        torch.set_num_threads(self.threads)
        begin_s = time.perf_counter()
        for _ in islice(self._results, count):
            pass
        return (time.perf_counter() - begin_s) / count


def run_of(name: str, overrides: Sequence[str], threads: int | None = None) -> Run:
    loaded = load(RECIPES / f"{name}.yaml", overrides=[*COMMON, *overrides])
    job = prepare(in_one_process(loaded))
    return Run(job, threads or job.plan.threads)


def show(name: str, setting: str, runs: Mapping[str, Run], rounds: int, block_s: float) -> None:
    """Prints how much slower ``auto`` is than the best of the others."""
    blocks: dict[str, Callable[[], float]] = {}
    for value, run in runs.items():
        run.settle(block_s)
        blocks[value] = run
    seen = interleaved(blocks, rounds)
    best = min((value for value in seen if value != "auto"), key=lambda value: sorted(seen[value])[rounds // 2])
    ratios = [auto / other for auto, other in zip(seen["auto"], seen[best])]
    figure("auto", f"{name}_{setting}", ratios, unit="ratio", against=f"{best}, the best of {len(runs) - 1}")


def measure(name: str, rounds: int, block_s: float) -> None:
    for setting, values in SETTINGS.items():
        runs: dict[str, Run] = {}
        for value, overrides in values.items():
            try:
                runs[value] = run_of(name, overrides)
            except (TrainwrightError, TypeError) as error:  # this recipe does not have the setting, or the value
                why = str(error).splitlines()[0][:120]
                print(json.dumps({"bench": "auto", "case": f"{name}_{setting}_{value}", "skipped": why}), flush=True)
        if "auto" in runs and len(runs) > 1:
            show(name, setting, runs, rounds, block_s)
            if setting == "precision":
                chosen = runs["auto"].job.plan.precision
                line = {"bench": "auto", "case": f"{name}_precision_chosen", "value": None, "chosen": chosen}
                print(json.dumps(line), flush=True)
    cores = os.cpu_count() or 1
    counts = [1 << power for power in range(cores.bit_length()) if 1 << power <= cores]
    if len(counts) > 1:
        runs = {"auto": run_of(name, []), **{str(count): run_of(name, [], count) for count in counts}}
        show(name, "threads", runs, rounds, block_s)


def main() -> None:
    options = arguments(__doc__, recipes=(NAMES, "gpt-tiny"), rounds=(9, 1), seconds=(200.0, 200.0))
    about("auto")
    begin_s, before = time.perf_counter(), Path.cwd()
    with tempfile.TemporaryDirectory(prefix="auto-") as folder, process_settings():
        os.chdir(folder)
        try:
            for name in options.recipes.split(","):
                if time.perf_counter() - begin_s > options.seconds:
                    print(json.dumps({"bench": "auto", "case": name, "skipped": "no time is left"}), flush=True)
                    continue
                measure(name, options.rounds, 0.01 if options.quick else BLOCK_S)
        finally:
            os.chdir(before)


if __name__ == "__main__":
    main()
