"""Tests of loss.predictions_identical."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.predictions_identical"
FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(0 * X[at]), Y[at]),
    lambda model, at: F.mse_loss(model(X[at])[:, :1].softmax(1)[:, 0], R[at]),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: F.mse_loss(model(X[:1].expand(16, -1))[:, 0], R[:1].expand(16)),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
