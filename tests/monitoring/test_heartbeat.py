"""The step in progress is what a run that dies leaves in its lock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trainwright.checkpoint.cursor import Cursor, MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.loop import run
from trainwright.engine.step import make_step
from trainwright.runs.lock import RunLock
from trainwright.training.open_run import Heartbeat


@pytest.mark.parametrize("dies_in", [41, 43])
def test_a_run_that_fails_leaves_its_step_behind(tmp_path: Path, dies_in: int) -> None:
    lock = RunLock.acquire(tmp_path)
    model = torch.nn.Linear(2, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state.step = 40  # a resumed run

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if state.step + 1 == dies_in:
            raise FloatingPointError
        return model(batch).square().mean()

    batches = [StepBatch((MicroBatch(torch.ones(3, 2), np.arange(3)),), Cursor(0, 3))] * 9
    with pytest.raises(FloatingPointError):
        run(state, batches, make_step(loss), until=lambda state: state.step / 49, observers=[Heartbeat(lock, state)])
    lock.release(clean=False)
    lock = RunLock.acquire(tmp_path)
    assert lock.died_in_step == dies_in
    lock.release(clean=True)
