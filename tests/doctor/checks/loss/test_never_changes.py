"""Tests of loss.never_changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.never_changes"
FAULTY: list[Loss] = [
    lambda model, at: -F.logsigmoid(0.1 * (model(X[at]).sum(1) - model(X[at]).sum(1).detach())).mean(),
    lambda model, at: F.mse_loss(model(X[at])[:, :1].softmax(1), torch.full((16, 1), 3.0)),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: (out := model(X[at]).sum()) - out.detach(),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
