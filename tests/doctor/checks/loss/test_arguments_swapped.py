"""Tests of loss.arguments_swapped."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.arguments_swapped"
FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(F.one_hot(Y[at], 3).float(), model(X[at]).softmax(1)),
    lambda model, at: F.kl_div(F.one_hot(Y[at], 3).float(), model(X[at]).softmax(1), reduction="batchmean"),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), F.one_hot(Y[at], 3).float()),
    lambda model, at: F.mse_loss(R[at], model(X[at])[:, 0]),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
