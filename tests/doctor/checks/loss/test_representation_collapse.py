"""Tests of loss.representation_collapse."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.loss.loops import Loss, X, codes

pytestmark = pytest.mark.slow
CODE = "loss.representation_collapse"


def alike(model: nn.Module, at: slice, stop: bool) -> Tensor:
    """Two views of the same rows; with stop-gradient a copy of the rows is the target."""
    one, other = model(X[at]), X[at] if stop else model(X[at] + 0.3)
    return -F.cosine_similarity(one, other.detach() if stop else other.roll(1, 0)).mean()


FAULTY: list[Loss] = [
    lambda model, at: alike(model, at, stop=False),
    lambda model, at: -(z := F.normalize(model(X[at]), dim=1)).matmul(z.T).mean(),
]
HEALTHY: list[Loss] = [
    lambda model, at: alike(model, at, stop=True),
    lambda model, at: (z := F.normalize(model(X[at]), dim=1)).matmul(z.T).square().mean(),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss, outputs=6, steps=40, lr=1.0)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss, outputs=6, steps=40, lr=1.0)
