"""Tests of loss.advantage_not_detached."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.loss.loops import Loss, R, X, codes

pytestmark = pytest.mark.slow
CODE = "loss.advantage_not_detached"


def actor_critic(model: nn.Module, at: slice, detached: bool, bonus: float) -> Tensor:
    out = model(X[at])
    policy, value = torch.distributions.Categorical(logits=out[:, :2]), out[:, 2]
    action = policy.sample()
    reward = R[at] * action
    advantage = reward - value
    advantage = advantage.detach() if detached else advantage
    loss = -(policy.log_prob(action) * advantage).mean() + 0.5 * F.mse_loss(value, reward)
    return loss - bonus * policy.entropy().mean()


FAULTY: list[Loss] = [
    lambda model, at: actor_critic(model, at, detached=False, bonus=0.01),
    lambda model, at: actor_critic(model, at, detached=False, bonus=0.0),
]
HEALTHY: list[Loss] = [
    lambda model, at: actor_critic(model, at, detached=True, bonus=0.01),
    lambda model, at: F.cross_entropy(model(X[at]), (R[at] > 0).long()),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)
