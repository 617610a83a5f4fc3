"""A rollback after a spike undoes everything that an update changes, and counts each step once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.checkpoint.average import Swa
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.engine.spikes import SpikeGuard

SPIKE, NOT_FINITE = 44, 38


class Scaled(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output * self.temperature, target)


def batch(step: int) -> StepBatch:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
    if step in (SPIKE, NOT_FINITE):
        x = x * (1e3 if step == SPIKE else float("nan"))
    return StepBatch((MicroBatch((x, y), np.arange(8) + 8 * step),))


def test_a_rollback_undoes_each_update_once_and_that_of_a_loss_too() -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 3), Scaled()
    parameters = [*model.parameters(), *loss.parameters()]
    state = tw.TrainState(model, torch.optim.Adam(parameters, lr=0.01))
    advance = tw.make_step(loss, spikes=SpikeGuard("rollback"))
    after: dict[int, list[Tensor]] = {}
    for step in range(1, SPIKE + 1):
        advance(state, batch(step))
        after[step] = [p.detach().clone() for p in parameters]

    state.ledger.read_pending()
    undone = sorted(entry.step for entry in state.ledger.entries)
    assert undone == list(range(undone[0], SPIKE + 1)) and undone[0] < NOT_FINITE
    assert all(torch.equal(now, then) for now, then in zip(after[SPIKE], after[undone[0] - 1], strict=True))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_a_rollback_undoes_what_entered_the_average(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    average = tw.Ema(model, 0.9) if kind == "ema" else Swa(model, start=20, every=1)
    state = tw.TrainState(model, torch.optim.Adam(model.parameters(), lr=0.01), ema=average)
    advance = tw.make_step(nn.CrossEntropyLoss(), spikes=SpikeGuard("rollback"))
    after: dict[int, tuple[int, list[Tensor]]] = {}
    for step in range(1, SPIKE + 1):
        advance(state, batch(step))
        after[step] = average.num_updates, [each.clone() for each in average.shadow.values()]

    state.ledger.read_pending()
    first = min(entry.step for entry in state.ledger.entries)
    assert after[SPIKE][0] == after[first - 1][0] < SPIKE
    assert all(torch.equal(now, then) for now, then in zip(after[SPIKE][1], after[first - 1][1], strict=True))
