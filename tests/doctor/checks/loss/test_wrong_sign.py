"""Tests of loss.wrong_sign."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.wrong_sign"
FAULTY: list[Loss] = [
    lambda model, at: -F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: 0.01 * model.weight.square().sum() - 3 * F.mse_loss(model(X[at])[:, 0], R[at]),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: F.mse_loss(model(X[at])[:, 0], R[at]) - 0.1 * F.mse_loss(model(X[at])[:, 1], -R[at]),
    lambda model, at: -model(X[at]).log_softmax(1).gather(1, Y[at, None]).mean(),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)


def test_maximize() -> None:
    assert CODE in codes(HEALTHY[0], maximize=True)
    assert CODE not in codes(FAULTY[0], maximize=True)
