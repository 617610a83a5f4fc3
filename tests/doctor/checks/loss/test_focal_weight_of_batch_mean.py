"""Tests of loss.focal_weight_of_batch_mean."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.loss.loops import Loss, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.focal_weight_of_batch_mean"


def focal(model: nn.Module, at: slice, reduction: str) -> Tensor:
    entropy = F.cross_entropy(model(X[at]), Y[at], reduction=reduction)
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


FAULTY: list[Loss] = [
    lambda model, at: focal(model, at, "mean"),
    lambda model, at: (1 - (-(loss := F.cross_entropy(model(X[at]), Y[at]))).exp()).pow(1.5) * loss,
]
HEALTHY: list[Loss] = [
    lambda model, at: focal(model, at, "none"),
    lambda model, at: (loss := F.cross_entropy(model(X[at]), Y[at])) * 0.5 + 0 * loss.detach().exp(),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
