"""Tests of loss.no_better_than_constant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes

CODE = "loss.no_better_than_constant"
WRONG = torch.randint(3, (64,), generator=torch.Generator().manual_seed(1))
FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(torch.zeros_like(X[at])), Y[at]),
    lambda model, at: F.mse_loss(model(X[at])[:, 0] * 0.0, R[at]) + 0 * WRONG[0],
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: F.mse_loss(model(X[at])[:, 0], R[at]),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss, steps=96)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss, steps=96)
