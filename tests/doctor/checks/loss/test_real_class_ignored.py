"""Tests of loss.real_class_ignored."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.loss.loops import Loss, X, codes

pytestmark = pytest.mark.slow
CODE = "loss.real_class_ignored"
TAGS = torch.randint(3, (64, 10), generator=torch.Generator().manual_seed(0))
PADDED = torch.where(torch.arange(10) < torch.randint(4, 11, (64, 1)), 1 + TAGS % 2, 0)


def loss_of(model: nn.Module, at: slice, tags: Tensor, ignored: int) -> Tensor:
    scores = model(X[at, None].expand(-1, 10, -1))
    return F.cross_entropy(scores.flatten(0, 1), tags[at].flatten(), ignore_index=ignored)


FAULTY: list[Loss] = [
    lambda model, at: loss_of(model, at, TAGS, 0),
    lambda model, at: F.cross_entropy(model(X[at, None].expand(-1, 10, -1)).mT, TAGS[at], ignore_index=2),
]
HEALTHY: list[Loss] = [
    lambda model, at: loss_of(model, at, TAGS, -100),
    lambda model, at: loss_of(model, at, PADDED, 0),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
