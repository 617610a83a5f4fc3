"""A run of our own engine whose step begins to do something else is heard of within 16 steps, without a tape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.engine.spikes import SpikeHandler
from trainwright.engine.step import StepFn
from trainwright.engine.witness import StepWitness
from trainwright.recorder.engine_changes import EngineChanges
from trainwright.recorder.inputs import InputRecorder
from trainwright.recorder.resting import EVERY
from trainwright.runlog.records import Examined, Record, Watched
from trainwright.state.cursor import MicroBatch, StepBatch
from trainwright.watching.engine_observer import EngineSession

ONSET, STEPS = 70, 90


def make(witness: StepWitness, spikes: SpikeHandler) -> StepFn:
    return tw.make_step(nn.CrossEntropyLoss(), witness=witness, spikes=spikes)


class Net(nn.Module):
    """Its forward pass may become another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)
        self.between: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(self.between(self.first(x))))
        return out


class Run:
    """What may become something else at a step."""

    def __init__(self) -> None:
        self.model = Net()
        self.state = tw.TrainState(self.model, torch.optim.Adam(self.model.parameters(), 0.01))
        self.loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
        self.factor = 1.0
        self.after_step: Callable[[], object] = lambda: None
        self.micro = 1

    def batch(self, step: int) -> StepBatch:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        if step == ONSET + 5:
            x.fill_(torch.nan)
        y, ids = torch.arange(8) % 3, np.arange(8)
        rows = [slice(start, start + 8 // self.micro) for start in range(0, 8, 8 // self.micro)]
        return StepBatch(tuple(MicroBatch((x[some], y[some]), ids[some]) for some in rows))


def changed(change: Callable[[Run], object]) -> list[int]:
    """The steps whose program was new, where ``change`` is made before step ONSET; step ONSET + 5 is skipped."""
    run = Run()
    changes = EngineChanges(run.model.modules(), list(run.model.parameters()))
    advance = tw.make_step(
        lambda output, target: run.loss(output, target),
        schedule=lambda step, fraction: run.factor,
        witness=InputRecorder(changes=changes),
    )
    found = []
    for step in range(1, STEPS + 1):
        if step == ONSET:
            change(run)
        result = advance(run.state, run.batch(step))
        if not bool(result.skipped) and changes.is_new(step, result.lr):
            found.append(step)
        changes.prepare_next(step)
        run.after_step()
    return found


@torch.no_grad()
def shrink(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(0.999)


CHANGES: dict[str, Callable[[Run], object]] = {
    "another function in forward": lambda run: setattr(run.model, "between", F.relu),
    "a part of forward is detached": lambda run: setattr(run.model, "between", torch.Tensor.detach),
    "another loss": lambda run: setattr(run, "loss", F.multi_margin_loss),
    "no dropout any more": lambda run: run.model.eval(),
    "one module evaluates": lambda run: run.model.drop.eval(),
    "a part is frozen": lambda run: run.model.first.requires_grad_(False),
    "a callback writes to the weights": lambda run: setattr(run, "after_step", partial(shrink, run.model)),
    "a learning rate of 0": lambda run: setattr(run, "factor", 0.0),
}


def test_a_change_is_heard_of_once_within_sixteen_steps() -> None:
    found = {name: changed(change) for name, change in CHANGES.items()}
    late = {name: steps for name, steps in found.items() if len(steps) != 1 or not ONSET <= steps[0] <= ONSET + EVERY}
    assert late == {}


def test_what_is_no_other_program() -> None:
    same: dict[str, Callable[[Run], object]] = {
        "nothing": lambda run: None,
        "more micro-batches": lambda run: setattr(run, "micro", 2),
        "a smaller learning rate": lambda run: setattr(run, "factor", 0.1),
    }
    found = {name: changed(change) for name, change in same.items()}
    assert found["nothing"] == found["a smaller learning rate"] == []
    assert len(found["more micro-batches"]) <= 1  # the share of each is a factor of its loss


@pytest.mark.slow
def test_looks_begin_anew_where_a_step_does_something_else() -> None:
    run, written = Run(), list[Record]()
    watched = EngineSession(run.state, make, write=written.append)
    advance = tw.make_step(nn.CrossEntropyLoss(), witness=watched.witness)
    for step in range(1, STEPS + 1):
        if step == ONSET:
            run.model.eval()
        watched.note(advance(run.state, run.batch(1)))
    watched.end(None)
    (at,) = [each.step for each in written if isinstance(each, Watched) and "changed" in each.values]
    assert ONSET <= at <= ONSET + EVERY
    looked_at = {each.step for each in written if isinstance(each, Examined) and each.step >= ONSET}
    assert at in looked_at and len(looked_at) > 2
