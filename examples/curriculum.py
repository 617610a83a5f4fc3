"""A curriculum: the length of the sequences grows with the step. The loop and the batch source are custom."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.models.gpt import gpt

VOCABULARY, LONGEST, SIZE = 12, 16, 16


def batches(first: int) -> Iterator[tw.StepBatch]:
    """The batch of step n is a function of n, so a resumed run only has to be told where to begin."""
    for step in count(first):
        generator = torch.Generator().manual_seed(step)
        length = min(4 + step // 5, LONGEST)
        start = torch.randint(VOCABULARY, (SIZE, 1), generator=generator)
        ids = (start + torch.arange(length + 1)) % VOCABULARY
        micro = tw.MicroBatch((ids[:, :-1], ids[:, 1:]), np.arange(SIZE) + SIZE * step)
        yield tw.StepBatch((micro,), tw.Cursor(0, SIZE * (step + 1)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tw.Loss:
    ids, target = batch
    return tw.Loss(F.cross_entropy(model(ids).flatten(0, 1), target.flatten(), reduction="sum"), target.numel())


def main(steps: int = 200, resume: Path | None = None) -> tw.TrainState:
    torch.manual_seed(0)
    model = gpt(vocab_size=VOCABULARY, block_size=LONGEST, layers=1, heads=2, d_model=16)
    state = tw.TrainState(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    if resume is not None:
        tw.load_checkpoint(state, resume)
    for result in tw.steps(state, batches(state.step), tw.make_step(loss), until=tw.for_steps(steps)):
        if result.step % 50 == 0:
            print(f"step {result.step}: loss {float(result.loss):.3f}")
        if result.step % 10 == 0:
            tw.save_checkpoint(state, "checkpoints")
    return state


if __name__ == "__main__":
    main()
