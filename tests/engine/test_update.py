"""An update that runs out of memory: what it has written decides whether the state is still whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import trainwright as tw
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.errors import OutOfMemoryError


class Two(nn.Module):
    """Its second part gets gradients from some step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.uses_other = nn.Linear(4, 2), nn.Linear(4, 2), False

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x) if self.uses_other else self.one(x)


BATCH = StepBatch((MicroBatch((torch.randn(8, 4), torch.randn(8, 2)), np.arange(8)),))


def run_out(optimizer: Optimizer, model: Two, before: Callable[[], object], writes: Callable[[], object]) -> bool:
    """Return `whole` of the error of the fifth update, which raises after ``writes``. ``before`` runs ahead of it."""
    state = tw.TrainState(model, optimizer)
    advance = tw.make_step(nn.MSELoss())
    for step in range(4):
        model.uses_other = step >= 2
        advance(state, BATCH)
    before()

    def fails() -> None:
        writes()
        raise MemoryError

    optimizer.step = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(OutOfMemoryError) as raised:
        advance(state, BATCH)
    return raised.value.whole


def nothing() -> None: ...


def held(model: nn.Module, optimizer: Optimizer) -> str:
    """Weights and moments."""
    return str([[*model.parameters()], optimizer.state_dict()["state"]])


def loaded_again(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", [Adam, lambda p: SGD(p, lr=0.1, momentum=0.9)])
def test_an_update_that_has_written_nothing_leaves_weights_and_moments(kind: Callable[..., Optimizer]) -> None:
    model = Two()
    optimizer = kind(model.parameters())
    kept: list[str] = []
    assert run_out(optimizer, model, lambda: kept.append(held(model, optimizer)), nothing)
    assert kept == [held(model, optimizer)], "moments that came late, too"


@pytest.mark.parametrize("kind", [Adam, lambda p: SGD(p, lr=0.1, momentum=0.9)])
def test_one_that_has_written_does_not_leave_the_state_whole(kind: Callable[..., Optimizer]) -> None:
    def to_a_weight() -> None:
        with torch.no_grad():
            model.other.weight.mul_(0.5)

    def to_a_moment() -> None:
        moments = [value for value in optimizer.state[model.one.weight].values() if value.dim() == 2]
        moments[0].mul_(0.5)

    for writes in (to_a_weight, to_a_moment):
        for loads in (False, True):
            model = Two()
            optimizer = kind(model.parameters())
            before = partial(loaded_again, optimizer) if loads else nothing
            assert not run_out(optimizer, model, before, writes), (writes, loads)
