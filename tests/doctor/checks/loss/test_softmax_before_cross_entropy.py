"""Tests of loss.softmax_before_cross_entropy."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.softmax_before_cross_entropy"
FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]).softmax(1), Y[at]),
    lambda model, at: F.nll_loss(model(X[at]).softmax(1).log_softmax(1), Y[at]),
    lambda model, at: F.binary_cross_entropy_with_logits(model(X[at]).sigmoid()[:, 0], (R[at] > 0).float()),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: F.cross_entropy(model(X[at]).log_softmax(1), Y[at]),
    lambda model, at: F.cross_entropy(model(X[at]).relu(), Y[at]),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
