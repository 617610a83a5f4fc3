"""Tests of loss.broadcast_target."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw
from tests.doctor.checks.loss.loops import WIDTH, Loss, R, X, codes

pytestmark = pytest.mark.slow
CODE = "loss.broadcast_target"
WARNS = pytest.mark.filterwarnings("ignore:Using a target size")
FAULTY = [
    lambda model, at: (model(X[at]) - R[at]).square().mean(),
    pytest.param(lambda model, at: F.l1_loss(model(X[at])[:, 0], R[at, None]), marks=WARNS),
]
HEALTHY: list[Loss] = [
    lambda model, at: (model(X[at])[:, 0] - R[at]).square().mean(),
    lambda model, at: F.mse_loss(model(X[at]), R[at, None]),
    lambda model, at: F.relu(1 - (model(X[at]) - model(X[at])[:, 0])).mean() + model(X[at]).square().mean(),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss, outputs=1)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss, outputs=1)


def test_found_in_the_loop_where_targets_are_indexed() -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(2):
            optimizer.zero_grad()
            (R[torch.randperm(16)] - model(X[:16])).square().mean().backward()
            optimizer.step()
    assert CODE in {each.code for each in watch.findings()}
