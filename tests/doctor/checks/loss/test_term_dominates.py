"""Tests of loss.term_dominates."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.term_dominates"
FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + 1e5 * F.mse_loss(model(X[at]).sum(1), R[at]),
    lambda model, at: F.mse_loss(model(X[at])[:, 0], R[at]) + F.mse_loss(1e3 * model(X[at])[:, 0], 1e3 * R[at]),
    lambda model, at: F.mse_loss(model(X[at])[:, 0], R[at]) + 1e6 * F.cross_entropy(model(X[at]), Y[at]),
]


def style_of_layers(model: nn.Module, at: slice) -> Tensor:
    outputs = model(X[at])
    return F.cross_entropy(outputs, Y[at]) + sum(F.mse_loss(s * outputs[:, 0], s * R[at]) for s in (1.0, 0.1, 0.001))


HEALTHY: list[Loss] = [
    style_of_layers,
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + F.mse_loss(model(X[at]).sum(1), R[at]),
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + 1e-5 * model.weight.square().sum(),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss, lr=1e-4)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss, lr=1e-4)
