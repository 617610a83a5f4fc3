"""Tests of loss.term_without_gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.loss.loops import Loss, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.term_without_gradient"


def penalty(model: nn.Module, at: slice, create_graph: bool) -> Tensor:
    x = X[at].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=create_graph)
    return (slope.norm(dim=1) - 1).square().mean()


FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + 10 * penalty(model, at, create_graph=False),
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + 0.1 * model(X[at]).detach().square().mean(),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + 10 * penalty(model, at, create_graph=True),
    lambda model, at: (loss := F.cross_entropy(model(X[at]), Y[at])) - loss.detach() + 1,
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + X[at].mean(),
    lambda model, at: ((p := (z := model(X[at])).softmax(1).detach()) * z).mean() + p.square().mean(),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
