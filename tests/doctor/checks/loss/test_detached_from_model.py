"""Tests of loss.detached_from_model."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.detached_from_model"
FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]).detach(), Y[at]).requires_grad_(),
    lambda model, at: F.cross_entropy(model(X[at]).data.clone().requires_grad_(), Y[at]),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + F.cross_entropy(model(X[at]).detach(), Y[at]),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
