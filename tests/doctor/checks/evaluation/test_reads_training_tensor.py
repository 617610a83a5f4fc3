"""Evaluations that read variables of the training loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

Evaluate = Callable[[nn.Module, Tensor, Tensor, Tensor], float]


def loss_of_training(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor) -> float:
    total = 0.0
    for rows in range(0, 64, 16):
        model(x[rows : rows + 16])
        total += loss.item()
    return total


def penalty_of_training(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor) -> float:
    total = 0.0
    for rows in range(0, 64, 16):
        out = model(x[rows : rows + 16])
        total += float(F.cross_entropy(out, y[rows : rows + 16])) + float(loss.sqrt())
    return total


def assigned(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor) -> float:
    total = 0.0
    for rows in range(0, 64, 16):
        loss = F.cross_entropy(model(x[rows : rows + 16]), y[rows : rows + 16])
        total += loss.item()
    return total


def logged_after_it(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor) -> float:
    return assigned(model, x, y, loss) - loss.item()


def scaled_by_weights(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor) -> float:
    total = 0.0
    for rows in range(0, 64, 16):
        out = model(x[rows : rows + 16]) / sum(p.norm() for p in model.parameters())
        total += float(F.cross_entropy(out, y[rows : rows + 16]))
    return total


def penalized(model: nn.Module, x: Tensor, y: Tensor, loss: Tensor) -> float:
    """Each batch makes a penalty with a graph. It may get the id of the penalty of an earlier batch."""
    total = 0.0
    for row in range(64):
        with torch.enable_grad():
            penalty = torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()
        total += F.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).item() + penalty.mul(0.1).item()
    return total


@pytest.mark.parametrize(
    ("evaluate", "found"),
    [
        (loss_of_training, True),
        (penalty_of_training, True),
        (assigned, False),
        (logged_after_it, False),
        (scaled_by_weights, False),
        (penalized, False),
    ],
)
def test_reads_training_tensor(evaluate: Evaluate, found: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for step in range(16):
            rows = torch.randint(64, (16,))
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 4 == 3:
                with torch.no_grad():
                    evaluate(model, x, y, loss)
    assert watch.session.failures == []
    assert ("evaluation.reads_training_tensor" in {each.code for each in watch.findings()}) == found
