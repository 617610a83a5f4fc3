"""Tests of loss.softmax_applied_twice."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.softmax_applied_twice"
FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + model(X[at]).softmax(1).softmax(1).square().sum(),
    lambda model, at: -(F.one_hot(Y[at]) * model(X[at]).softmax(1).softmax(1)).sum(),
]
HEALTHY: list[Loss] = [
    lambda model, at: -(F.one_hot(Y[at]) * model(X[at]).softmax(1)).sum(),
    lambda model, at: F.nll_loss(model(X[at]).log_softmax(1), Y[at]),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
