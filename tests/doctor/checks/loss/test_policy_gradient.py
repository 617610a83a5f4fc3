"""Tests of loss.advantage_not_detached and loss.entropy_minimized."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.loss.loops import Loss, R, X, codes

pytestmark = pytest.mark.slow
ADVANTAGE, ENTROPY = "loss.advantage_not_detached", "loss.entropy_minimized"


def actor_critic(model: nn.Module, at: slice, detached: bool, bonus: float) -> Tensor:
    out = model(X[at])
    policy, value = torch.distributions.Categorical(logits=out[:, :2]), out[:, 2]
    action = policy.sample()
    reward = R[at] * action
    advantage = reward - value
    advantage = advantage.detach() if detached else advantage
    loss = -(policy.log_prob(action) * advantage).mean() + 0.5 * F.mse_loss(value, reward)
    return loss - bonus * policy.entropy().mean()


def single_actions(model: nn.Module, at: slice, detached: bool) -> Tensor:
    """One action at a time, as in an episode."""
    terms = []
    for x, r in zip(X[at], R[at]):
        out = model(x)
        policy, value = torch.distributions.Categorical(logits=out[:2]), out[2:]
        action = policy.sample()
        advantage = r - value
        terms += [
            -policy.log_prob(action) * (advantage.detach() if detached else advantage),
            F.mse_loss(value, r[None]),
        ]
    return torch.cat([each.view(1) for each in terms]).sum()


def entropy_of_classes(model: nn.Module, at: slice) -> Tensor:
    p = model(X[at]).softmax(1)
    return -(p * p.log()).sum(1).mean()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda model, at: actor_critic(model, at, detached=False, bonus=0.01), {ADVANTAGE}),
        (lambda model, at: actor_critic(model, at, detached=False, bonus=0.0), {ADVANTAGE}),
        (lambda model, at: single_actions(model, at, detached=False), {ADVANTAGE}),
        (lambda model, at: single_actions(model, at, detached=True), set()),
        (lambda model, at: actor_critic(model, at, detached=True, bonus=-0.01), {ENTROPY}),
        (lambda model, at: actor_critic(model, at, detached=True, bonus=-1.0), {ENTROPY}),
        (lambda model, at: actor_critic(model, at, detached=True, bonus=0.01), set()),
        (lambda model, at: F.cross_entropy(model(X[at]), (R[at] > 0).long()), set()),
        (entropy_of_classes, set()),
    ],
    ids=[
        "advantage",
        "advantage-alone",
        "episode",
        "episode-detached",
        "entropy",
        "entropy-strong",
        "healthy",
        "classifier",
        "entropy-as-loss",
    ],
)
def test_policy_gradients(loss: Loss, expected: set[str]) -> None:
    assert codes(loss) & {ADVANTAGE, ENTROPY} == expected
