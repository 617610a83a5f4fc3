"""Tests of loss.starts_far_above_chance."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.starts_far_above_chance"
FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(100 * model(X[at]), Y[at]),
    lambda model, at: F.binary_cross_entropy_with_logits(100 * model(X[at])[:, 0], (R[at] > 0).float()),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: F.mse_loss(model(X[at])[:, 0], R[at] + 50),
    lambda model, at: F.cross_entropy(64 * F.normalize(model(X[at]), dim=1), Y[at]),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss, lr=1e-6)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss, lr=1e-6)
