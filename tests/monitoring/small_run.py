"""A state and batches for runs of a few steps."""

from __future__ import annotations

import numpy as np
import torch

from trainwright.checkpoint.cursor import Cursor, MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState


def make_state() -> TrainState:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.01))


def batches(count: int, *, poisoned: int = -1) -> list[StepBatch]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for step in range(count):
        x = torch.randn(3, 4, generator=generator)
        if step == poisoned:
            x[1] = float("nan")
        ids = np.arange(3 * step, 3 * step + 3)
        made.append(StepBatch((MicroBatch((x, x.sum(1, keepdim=True)), ids),), Cursor(0, 3 * step + 3)))
    return made
