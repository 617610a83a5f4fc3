"""Peak memory and time of activation checkpointing on a 12-layer GPT: every block, selective, torch's budget, planned.

    python -m benchmarks.checkpointing_frontier [--quick] [--rounds 7] [--rows 4] [--compiled 1]

A peak is the largest running sum of the allocator's events (torch's profiler) within one step, above the memory that is
held between steps without gradients. ``activations`` are those at the peak of the simulated plain step. Times are CPU
times of full steps with one thread, because the machine may have other work. Each candidate runs once per round; the
value is the median of the ratios candidate / plain. ``at_every_block`` is the planner's choice with the peak of
every-block checkpointing as budget, ``at_half`` its choice with the plain peak minus half of the activations as budget.
``--compiled 1`` adds torch's ``activation_memory_budget``, relative to the compiled step with budget 1. It needs
torch.compile (its partitioner, with eager kernels).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import figures
from benchmarks.plan_accuracy import SECOND, peak_of
from trainwright.assembly.checkpointing import SELECTIVE, apply_checkpointing
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.losses import language_model
from trainwright.engine.step import make_step
from trainwright.models.gpt import gpt
from trainwright.plan.checkpointing import Checkpointing, describe
from trainwright.plan.trace.checkpointing_planner import Candidate, CheckpointingPlanner, Speed
from trainwright.plan.trace.traced_step import TracedObjects, trace_step

BENCH = "checkpointing_frontier"
MIB = 2**20
SPEED = Speed(1e11, 1e10, overlaps=False)
BUDGETS = (1.0, 0.5, 0.2, 0.0)


def shape(quick: bool) -> dict[str, int]:
    width, length = (64, 64) if quick else (256, 256)
    return {"vocab_size": 512, "block_size": length, "layers": 12, "heads": 4, "d_model": width}


class Bench:
    """One model and batch. Its activation checkpointing is changed between steps."""

    def __init__(self, quick: bool, rows: int) -> None:
        torch.manual_seed(0)
        self.shape, self.rows = shape(quick), rows
        self.model = gpt(**self.shape)
        ids = torch.randint(self.shape["vocab_size"], (rows, self.shape["block_size"]))
        self.batch = StepBatch((MicroBatch((ids, ids.clone()), torch.arange(rows).numpy()),))
        self.advance = make_step(language_model)
        self.state = self._state(self.model)

    def _state(self, model: nn.Module) -> TrainState:
        return TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def subject(self, device: torch.device) -> TracedObjects:
        model = gpt(**self.shape)
        ids = torch.zeros(self.rows, self.shape["block_size"], dtype=torch.int64)
        return TracedObjects(model, language_model, torch.optim.AdamW(model.parameters()), (ids, ids.clone()))

    def plain_or(self, checkpointing: Checkpointing) -> Callable[[], TrainState]:
        def ready() -> TrainState:
            apply_checkpointing(self.model, checkpointing)
            return self.state

        return ready

    def compiled(self, budget: float) -> Callable[[], TrainState]:
        apply_checkpointing(self.model, Checkpointing.none(12))
        model = copy.deepcopy(self.model)
        model.compile(backend="aot_eager_decomp_partition")
        state = self._state(model)

        def ready() -> TrainState:
            if torch._functorch.config.activation_memory_budget != budget or not state.step:
                torch._functorch.config.activation_memory_budget = budget
                torch._dynamo.reset()  # else the code compiled for another budget would be used
                self.advance(state, self.batch)
            return state

        return ready

    def seconds(self, ready: Callable[[], TrainState]) -> float:
        state = ready()
        start = time.thread_time()
        self.advance(state, self.batch)
        return time.thread_time() - start

    def peak(self, ready: Callable[[], TrainState]) -> int:
        state = ready()
        self.advance(state, self.batch)
        state.optimizer.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, record_function(SECOND):
            self.advance(state, self.batch)
        return peak_of(profiled)


def planned(bench: Bench) -> dict[str, Candidate]:
    began = time.perf_counter()
    planner = CheckpointingPlanner(bench.subject, partial(trace_step, device="cpu", clip=False), SPEED)
    plain = planner.none.trace.peak
    half = plain.total - plain.held["activations"] // 2
    chosen = {"plain": planner.none, "every_block": planner.every}
    chosen["at_every_block"] = planner.choose(planner.every.peak_bytes)
    chosen["at_half"] = planner.choose(half)
    figures.figure(BENCH, "planning", [time.perf_counter() - began], unit="s", against="two budgets")
    figures.figure(BENCH, "activations", [plain.held["activations"] / MIB], unit="MiB", against="simulated plain step")
    for name in ("at_every_block", "at_half"):
        print(
            f'{{"bench": "{BENCH}", "case": "{name}", "choice": "{describe(chosen[name].checkpointing)}"}}', flush=True
        )
    return chosen


def report(bench: Bench, ready: dict[str, Callable[[], TrainState]], base: str, rounds: int) -> None:
    blocks: dict[str, Any] = {name: partial(bench.seconds, each) for name, each in ready.items()}
    seen = figures.interleaved(blocks, rounds)
    for name, each in ready.items():
        figures.figure(BENCH, f"{name}_peak", [bench.peak(each) / MIB], unit="MiB", against="held between steps")
        figures.figure(BENCH, f"{name}_time", figures.ratios(seen[name], seen[base]), unit="ratio", against=base)
    if "at_every_block" in seen:
        same = figures.ratios(seen["at_every_block"], seen["every_block"])
        figures.figure(BENCH, "same_peak_time", same, unit="ratio", against="every_block")


def main() -> None:
    options = figures.arguments(__doc__, rounds=(7, 1), rows=(4, 2), compiled=(0, 0))
    figures.about("checkpointing_frontier")
    torch.set_num_threads(1)
    bench = Bench(options.quick, options.rows)
    ready = {name: bench.plain_or(candidate.checkpointing) for name, candidate in planned(bench).items()}
    ready["selective"] = bench.plain_or(Checkpointing.every(12, SELECTIVE))
    report(bench, ready, "plain", options.rounds)
    if options.compiled:
        compiled = {f"torch_budget_{budget}": bench.compiled(budget) for budget in BUDGETS}
        report(bench, compiled, "torch_budget_1.0", options.rounds)


if __name__ == "__main__":
    main()
