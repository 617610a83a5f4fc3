"""Tests of loss.cross_entropy_over_one_class."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.doctor.checks.loss.loops import Loss, R, X, codes

pytestmark = pytest.mark.slow
CODE = "loss.cross_entropy_over_one_class"
FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at])[:, :1], (R[at] > 0).float()[:, None]),
    lambda model, at: F.cross_entropy(model(X[at])[:, :1], torch.zeros(16, dtype=torch.long)),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at])[:, :2], (R[at] > 0).long()),
    lambda model, at: F.binary_cross_entropy_with_logits(model(X[at])[:, :1], (R[at] > 0).float()[:, None]),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
