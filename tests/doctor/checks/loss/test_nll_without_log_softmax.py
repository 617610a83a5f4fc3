"""Tests of loss.nll_without_log_softmax."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.doctor.checks.loss.loops import Loss, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.nll_without_log_softmax"


def ctc(scores: Tensor) -> Tensor:
    """The rows as the steps of one sequence."""
    return F.ctc_loss(scores[:, None], torch.tensor([[1, 2, 1]]), torch.tensor([len(scores)]), torch.tensor([3]))


FAULTY: list[Loss] = [
    lambda model, at: ctc(model(X[at])),
    lambda model, at: F.nll_loss(model(X[at]).softmax(1), Y[at]),
    lambda model, at: F.nll_loss(model(X[at]), Y[at]),
    lambda model, at: F.kl_div(model(X[at]).softmax(1), F.one_hot(Y[at], 3).float(), reduction="batchmean"),
]
HEALTHY: list[Loss] = [
    lambda model, at: ctc(model(X[at]).log_softmax(1)),
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
