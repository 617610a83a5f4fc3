"""Tests of loss.compared_with_itself."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, R, X, codes

pytestmark = pytest.mark.slow
CODE = "loss.compared_with_itself"
FAULTY: list[Loss] = [
    lambda model, at: F.mse_loss((out := model(X[at])), out.detach()) + 1e-3 * model.weight.square().sum(),
    lambda model, at: ((out := model(X[at])) - out.detach()).square().mean(),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.mse_loss(model(X[at])[:, 0], R[at]),
    lambda model, at: F.mse_loss((out := model(X[at])), (out + 0.1).detach()),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
