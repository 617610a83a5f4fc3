"""Tests of loss.nll_without_log_softmax."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.nll_without_log_softmax"
FAULTY: list[Loss] = [
    lambda model, at: F.nll_loss(model(X[at]).softmax(1), Y[at]),
    lambda model, at: F.nll_loss(model(X[at]), Y[at]),
    lambda model, at: F.kl_div(model(X[at]).softmax(1), F.one_hot(Y[at], 3).float(), reduction="batchmean"),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.nll_loss(model(X[at]).log_softmax(1), Y[at]),
    lambda model, at: F.kl_div(model(X[at]).log_softmax(1), F.one_hot(Y[at], 3).float(), reduction="batchmean"),
    lambda model, at: F.nll_loss((1 - model(X[at]).softmax(1)) ** 2 * model(X[at]).log_softmax(1), Y[at]),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
