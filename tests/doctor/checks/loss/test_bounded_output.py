"""Tests of loss.bounded_output."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.bounded_output"
FAULTY: list[Loss] = [
    lambda model, at: F.mse_loss(model(X[at])[:, 0].relu(), R[at]),
    lambda model, at: F.cross_entropy(model(X[at]).sigmoid(), Y[at]),
    lambda model, at: F.binary_cross_entropy_with_logits(model(X[at])[:, 0].relu(), (R[at] > 0).float()),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.mse_loss(model(X[at])[:, 0].relu(), R[at].abs()),
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: F.mse_loss(model(X[at])[:, 0].sigmoid(), R[at].sigmoid()),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
