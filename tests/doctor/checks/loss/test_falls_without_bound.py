"""Tests of loss.falls_without_bound."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.falls_without_bound"
FAULTY: list[Loss] = [
    lambda model, at: F.mse_loss(model(X[at])[:, 0], R[at]) - 2 * model(X[at]).square().mean(),
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) - model(X[at]).exp().mean(),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: -model(X[at]).tanh().sum(),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss, steps=96, lr=0.03)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss, steps=96, lr=0.03)
