"""Several tasks on one trunk: each step draws a task, with a probability that grows with its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

SIZES, BATCH, TEMPERATURE = {"parity": 512, "sum": 128}, 32, 2.0
Tasks = Mapping[str, tuple[Tensor, Tensor]]


class Multitask(nn.Module):
    """A trunk, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleDict({"parity": nn.Linear(64, 2), "sum": nn.Linear(64, 7)})

    def forward(self, task: str, x: Tensor) -> Tensor:
        return self.heads[task](self.trunk(x))


def tasks() -> Tasks:
    """Of six bits: whether their sum is odd, and the sum."""
    torch.manual_seed(0)
    bits = {task: torch.randint(2, (size, 6)) for task, size in SIZES.items()}
    labels = {"parity": bits["parity"].sum(1) % 2, "sum": bits["sum"].sum(1)}
    return {task: (bits[task].float(), labels[task]) for task in SIZES}


def batches(data: Tasks, first: int) -> Iterator[tw.StepBatch]:
    """Each step draws its task with the root of the task's size (temperature 2), from a generator of its own."""
    names, roots = list(data), torch.tensor([float(size) for size in SIZES.values()]) ** (1 / TEMPERATURE)
    for step in count(first):
        generator = torch.Generator().manual_seed(step)
        task = names[int(torch.multinomial(roots, 1, generator=generator))]
        rows = torch.randint(SIZES[task], (BATCH,), generator=generator)
        x, label = data[task]
        yield tw.StepBatch(
            (tw.MicroBatch((task, x[rows], label[rows]), rows.numpy()),), tw.Cursor(0, BATCH * (step + 1))
        )


def loss(model: nn.Module, batch: tuple[str, Tensor, Tensor]) -> tw.Loss:
    task, x, label = batch
    return tw.Loss(F.cross_entropy(model(task, x), label, reduction="sum"), float(len(label)))


def main(steps: int = 300, resume: Path | None = None) -> tw.TrainState:
    data = tasks()
    model = Multitask()
    state = tw.TrainState(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    if resume is not None:
        tw.load_checkpoint(state, resume)
    for result in tw.steps(state, batches(data, state.step), tw.make_step(loss), until=tw.for_steps(steps)):
        if result.step % 100 == 0:
            print(f"step {result.step}: {result.batch.data[0]} {float(result.loss):.3f}")
        if result.step % 10 == 0:
            tw.save_checkpoint(state, "checkpoints")
    return state


if __name__ == "__main__":
    main()
