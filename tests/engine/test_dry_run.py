"""The dry run leaves nothing behind."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.engine.plain import cut
from trainwright.engine.dry_run import Mode, dry_run
from trainwright.engine.precision import FP32
from trainwright.state.cursor import MicroBatch, StepBatch
from trainwright.state.train_state import TrainState

REMEMBERED: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()
"""What is behind weak references is not restored."""


class Remembering(nn.Module):
    """Applies ``function`` and remembers its results weakly."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.name = name
        REMEMBERED[self] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        result: Tensor = torch.softmax(hidden, -1) if self.name == "softmax" else getattr(torch, self.name)(hidden)
        REMEMBERED[self].append(weakref.ref(result))
        return result


@pytest.mark.parametrize("name", ["tanh", "relu", "exp", "sigmoid", "softmax"])
def test_gives_back_the_activations_of_operators_that_save_their_result(name: str) -> None:
    model = Remembering(name)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = cut((torch.randn(4, 8), torch.randint(3, (4,))), 4)
    seen = dry_run(state, batch, nn.functional.cross_entropy, modes=[Mode(FP32, 1)], budget_s=0)
    gc.collect()
    results = REMEMBERED[model]
    assert seen.activation_bytes > 0 and len(results) >= 4
    assert [result() for result in results] == [None] * len(results)


def test_the_update_is_timed_and_leaves_no_trace() -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    batch = StepBatch((MicroBatch(torch.randn(1, 512), np.arange(1)),))
    seen = dry_run(TrainState(model, optimizer), batch, lambda model, x: model(x).mean(), modes=[Mode(FP32, 1)])
    assert 0 < seen.update_s < 1
    assert torch.equal(model.weight, before) and model.weight.grad is None and not optimizer.state


@pytest.mark.slow
def test_first_calls_that_are_slow_do_not_count() -> None:
    """As on a busy machine, where two calls of half a second each came before steps of a tenth of that."""

    class Warming(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            time.sleep(0.51 if self.calls <= 3 else 0.0)  # one of them is not timed
            return super().forward(x)

    model = Warming(8, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = StepBatch((MicroBatch(torch.randn(1, 8), np.arange(1)),))
    seen = dry_run(state, batch, lambda model, x: model(x).mean(), modes=[Mode(FP32, 1)])
    assert seen.seconds["fp32", 1] < 0.25


def test_an_optimizer_that_cannot_be_copied_is_not_timed() -> None:
    class Alone(torch.optim.SGD):
        def __deepcopy__(self, memo: object) -> Alone:
            raise TypeError("there is one of these")

    model = nn.Linear(4, 4)
    batch = StepBatch((MicroBatch(torch.randn(1, 4), np.arange(1)),))
    state = TrainState(model, Alone(model.parameters(), lr=1.0))
    assert dry_run(state, batch, lambda model, x: model(x).mean(), modes=[Mode(FP32, 1)]).update_s == 0.0


def test_waiting_is_no_work_of_the_thread() -> None:
    """A busy machine lets a step wait: its processor time stays."""

    class Waiting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.05)
            return super().forward(x)

    model = Waiting(8, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = StepBatch((MicroBatch(torch.randn(1, 8), np.arange(1)),))
    seen = dry_run(state, batch, lambda model, x: model(x).mean(), modes=[Mode(FP32, 1)], budget_s=0.0)
    assert seen.seconds["fp32", 1] >= 0.05
    assert 0 < seen.thread_s["fp32", 1] < 0.025
