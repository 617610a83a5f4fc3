"""Outputs whose term is left out of the loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

Loss = Callable[[Tensor, Tensor], Tensor]


def only_the_last_term(made: Tensor, y: Tensor) -> Tensor:
    for n in range(4):
        loss = F.mse_loss(made[:, n], y[:, n])
    return loss


def wrong_columns(made: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(made[:, [0, 2, 3]], y[:, :3])


def all_terms(made: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(made, y)


def first_outputs(made: Tensor, y: Tensor) -> Tensor:
    """As of a padded vocabulary, or of a variance that is not learned."""
    return F.mse_loss(made[:, :3], y[:, :3])


def one_in_turn(made: Tensor, y: Tensor) -> Tensor:
    n = int(torch.randint(1, 4, ()))
    return F.mse_loss(made[:, n], y[:, n])


def conv() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 3), nn.Flatten())


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize(
    ("loss", "idle"),
    [(only_the_last_term, 3), (wrong_columns, 1), (all_terms, 0), (first_outputs, 0), (one_in_turn, 0)],
)
def test_outputs_unused(loss: Loss, idle: int, kind: str) -> None:
    torch.manual_seed(0)
    model = conv() if kind == "conv" else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(40):
            optimizer.zero_grad()
            loss(model(torch.randn(16, 6)), torch.randn(16, 4)).backward()
            optimizer.step()
    assert watch.session.failures == []
    found = [each for each in watch.findings() if each.code == "loss.outputs_unused"]
    assert [each.evidence[0].seen for each in found] == ([idle] if idle else [])
