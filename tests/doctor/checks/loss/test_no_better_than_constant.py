"""Tests of loss.no_better_than_constant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.doctor.checks import calls
from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes
from trainwright.doctor.facts.loss import LossFacts, MeasuredLoss

pytestmark = pytest.mark.slow
CODE = "loss.no_better_than_constant"
FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(0.1 * model(torch.randn(16, 6)), Y[at]),
    lambda model, at: F.mse_loss(0.1 * model(torch.randn(16, 6))[:, 0], R[at]),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
    lambda model, at: F.mse_loss(model(X[at])[:, 0], R[at]),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss, steps=96)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss, steps=96)


def test_a_replay_does_not_hide_what_was_measured_live() -> None:
    rows = tuple((2.0 + 0.01 * (n % 2), 2.0, 2.0) for n in range(8))
    live = LossFacts(given=(MeasuredLoss("cross_entropy", steps=30, rows=rows),), steps=30)
    replayed = LossFacts(given=(MeasuredLoss("cross_entropy", rows=rows[:1]),))
    losses = tuple(2.0 + 0.01 * (n % 2) for n in range(200))
    assert calls.fires(CODE, (192, live), (200, replayed), made=calls.steps(losses=losses))
    assert not calls.fires(CODE, (200, replayed), made=calls.steps(losses=losses))


@pytest.mark.parametrize(("op", "found"), [("mse_loss", False), ("cross_entropy", True)], ids=["MAML", "two terms"])
def test_an_inner_loss_knows_nothing_before_the_weights_are_adapted(op: str, found: bool) -> None:
    blind = tuple((2.0 + 0.01 * (n % 2), 2.0, 2.0) for n in range(8))
    adapted = MeasuredLoss(op, steps=30, rows=tuple((0.1, 2.0, 4.0 + n) for n in range(8)))
    facts = LossFacts(given=(MeasuredLoss("mse_loss", steps=30, rows=blind), adapted), steps=30)
    losses = tuple(2.0 + 0.01 * (n % 2) for n in range(200))
    assert bool(calls.fires(CODE, (192, facts), made=calls.steps(losses=losses))) == found
