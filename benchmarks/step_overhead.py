"""A step of our engine against a hand-written loop: ratio of wall times, below 1 is faster.

    python -m benchmarks.step_overhead [--quick]

The plain loop is what one writes first: torch's AdamW with its default settings, clip_grad_norm_, LambdaLR, and
no logging at all. Ours is ``engine.loop.run`` with every observer of a real run: the log is written each 10
steps, non-finite updates are guarded against and noted. Optimizer as ``make_optimizer`` gives it; the cases
``*_same_optimizer`` use the plain loop's instead, and so show what the engine alone costs. Both loops train on the
same tensors, already in memory; only ``mlp_loader`` reads a dataset. A step at accumulation 4 is four micro-batches
of the size that accumulation 1 has.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.figures import arguments, figure, interleaved, ratios, seconds_of
from trainwright.build.data import Loading, StepBatches
from trainwright.build.optim.choose import make_optimizer
from trainwright.build.schedule import make_schedule
from trainwright.engine.clip import make_clip
from trainwright.engine.loop import Observer, run
from trainwright.engine.losses import cross_entropy, language_model
from trainwright.engine.step import make_step
from trainwright.engine.until import for_steps
from trainwright.models.gpt import gpt
from trainwright.models.mlp import mlp
from trainwright.observe.cadence import Every
from trainwright.observe.journal import Journal
from trainwright.observe.progress import Progress
from trainwright.observe.signals import Signals
from trainwright.observe.step_log import StepLog
from trainwright.observe.telemetry import TelemetryReader
from trainwright.runlog.writer import LogWriter
from trainwright.state.cursor import Cursor, MicroBatch, StepBatch
from trainwright.state.train_state import TrainState

Pair = tuple[Tensor, Tensor]
Block = Callable[[], float]
"""Takes some steps; returns the seconds they took."""
LR, DECAY, CLIP_AT, WARMUP, TOTAL = 1e-3, 0.01, 1.0, 100, 100_000
NUM_BATCHES = 64  # kept in memory and used in turn


@dataclass(frozen=True)
class Task:
    """What both loops train. ``loss`` is the mean over a batch in the plain loop, ``our_loss`` ours."""

    make_model: Callable[[], nn.Module]
    batches: Sequence[Pair]
    loss: Callable[[nn.Module, Pair], Tensor]
    our_loss: Callable[..., Any]
    steps: int


def mlp_task(steps: int, *, our_loss: Callable[..., Any] = F.cross_entropy) -> Task:
    """20-64-64-10, batches of 64: a step so small that it is all overhead."""
    draw = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(64, 20, generator=draw), torch.randint(10, (64,), generator=draw)) for _ in range(NUM_BATCHES)
    ]

    def loss(model: nn.Module, batch: Pair) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Task(lambda: mlp(sizes=[20, 64, 64, 10]), batches, loss, our_loss, steps)


def gpt_task(steps: int) -> Task:
    """nanoGPT's size for a CPU: 4 layers of 128, 12 windows of 64 characters."""
    draw = torch.Generator().manual_seed(0)
    windows = [torch.randint(103, (12, 65), generator=draw) for _ in range(NUM_BATCHES)]
    batches = [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]

    def loss(model: nn.Module, batch: Pair) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def make_model() -> nn.Module:
        return gpt(vocab_size=103, block_size=64, layers=4, heads=4, d_model=128)

    return Task(make_model, batches, loss, language_model, steps)


def torch_default(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)


def our_default(model: nn.Module) -> Optimizer:
    return make_optimizer("adamw", model, lr=LR, weight_decay=DECAY)


def plain_block(task: Task, accumulation: int, batches: Iterator[Pair]) -> Block:
    """The hand-written loop."""
    torch.manual_seed(0)
    model = task.make_model()
    optimizer = torch_default(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / TOTAL))),
    )

    def block() -> None:
        for _ in range(task.steps):
            optimizer.zero_grad()
            for _ in range(accumulation):
                loss = task.loss(model, next(batches)) / accumulation
                loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_AT)
            optimizer.step()
            scheduler.step()

    return lambda: seconds_of(block)


def our_block(
    task: Task,
    batches: Iterator[StepBatch],
    folder: Path,
    *,
    optimizer: Callable[[nn.Module], Optimizer] = our_default,
) -> Block:
    """Our engine, with what ``trainwright train`` has around it."""
    torch.manual_seed(0)
    model = task.make_model()
    state = TrainState(model, optimizer(model))
    advance = make_step(
        task.our_loss,
        schedule=make_schedule("cosine", total=TOTAL, warmup=WARMUP),
        clip=make_clip("norm", CLIP_AT),
    )
    observers = all_observers(folder)

    def block() -> None:
        run(state, batches, advance, until=for_steps(state.step + task.steps), observers=observers)

    return lambda: seconds_of(block)


def all_observers(folder: Path) -> list[Observer]:
    """Those of ``trainwright.training.run``, with its default cadence."""
    number = len(list(folder.iterdir()))
    progress = Progress(Console(file=(folder / f"{number}.txt").open("w")))
    journal = Journal(LogWriter(folder / f"{number}.jsonl"), progress.say)
    recorder = StepLog(journal, [], Every(steps=10))
    return [recorder, TelemetryReader(journal, [], folder=folder), progress, Signals(progress.say)]


def in_turn(task: Task) -> Iterator[Pair]:
    """The batches in memory, for ever."""
    return itertools.cycle(task.batches)


def step_batches(task: Task, accumulation: int) -> Iterator[StepBatch]:
    """The same tensors in the same order, as our loader hands them over."""
    pairs = in_turn(task)
    ids = np.arange(len(task.batches[0][0]), dtype=np.int64)
    for number in itertools.count(1):
        micro = tuple(MicroBatch(next(pairs), ids) for _ in range(accumulation))
        yield StepBatch(micro, Cursor(0, number))


def loader_blocks(task: Task, folder: Path) -> dict[str, Block]:
    """Both with a loader of their own over one TensorDataset, shuffled, in the training process."""
    dataset = TensorDataset(*(torch.cat(parts) for parts in zip(*task.batches, strict=True)))
    size = len(task.batches[0][0])

    def endless() -> Iterator[Pair]:
        loader = DataLoader(dataset, batch_size=size, shuffle=True)
        while True:
            yield from loader

    ours = iter(StepBatches(dataset, Loading(batch_size=size, micro_size=size)))
    return {"plain": plain_block(task, 1, endless()), "mlp_loader": our_block(task, ours, folder)}


def blocks_of(name: str, task: Task, accumulation: int, folder: Path) -> dict[str, Block]:
    """The plain loop, ours, and ours with the plain loop's optimizer."""
    case = f"{name}_accum{accumulation}"
    return {
        "plain": plain_block(task, accumulation, in_turn(task)),
        case: our_block(task, step_batches(task, accumulation), folder),
        f"{case}_same_optimizer": our_block(task, step_batches(task, accumulation), folder, optimizer=torch_default),
    }


def measure(blocks: dict[str, Block], given: Namespace, *, name: str, steps: int) -> None:
    """Prints each case as a ratio to the plain loop, and the plain loop's step in microseconds."""
    seconds = interleaved(blocks, given.rounds, uncounted=0 if given.quick else 1)
    plain = seconds.pop("plain")
    figure("step_overhead", f"{name}_plain", [1e6 * s / steps for s in plain], unit="us", against="absolute")
    for case, ours in seconds.items():
        figure("step_overhead", case, ratios(ours, plain), unit="ratio", against="plain loop")


def main() -> None:
    given = arguments(__doc__, rounds=(15, 2))
    torch.set_num_threads(given.threads)
    mlp_steps, gpt_steps = (20, 1) if given.quick else (400, 8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for accumulation in (1, 4):
            task = mlp_task(mlp_steps // accumulation)
            blocks = blocks_of("mlp", task, accumulation, folder)
            if accumulation == 1:  # the recipe's loss: a sum with its weight, and the accuracy besides
                with_accuracy = mlp_task(task.steps, our_loss=cross_entropy)
                blocks["mlp_accum1_with_accuracy"] = our_block(with_accuracy, step_batches(task, 1), folder)
            measure(blocks, given, name=f"mlp_accum{accumulation}", steps=task.steps)
        task = mlp_task(mlp_steps)
        measure(loader_blocks(task, folder), given, name="mlp_loader", steps=task.steps)
        for accumulation in (1, 4):
            task = gpt_task(max(1, gpt_steps // accumulation))
            blocks = blocks_of("gpt", task, accumulation, folder)
            measure(blocks, given, name=f"gpt_accum{accumulation}", steps=task.steps)


if __name__ == "__main__":
    main()
