"""A policy and a value for reinforcement learning. Shapes: F numbers of an observation, A actions."""

from __future__ import annotations

from torch import Tensor, nn

from trainwright.models.mlp import mlp
from trainwright.models.options import require_counts

LAST_LAYER_GAIN = 0.01
"""Gain of the last layer of the policy, so that initial probabilities are nearly equal (arXiv 2005.12729)."""


class ActorCritic(nn.Module):
    """observations (..., F) -> logits (..., A) and value (...), by two networks with two hidden layers each."""

    def __init__(self, observations: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.observations = observations
        self.actions = actions
        self.hidden = hidden
        require_counts(self, dict.fromkeys(("observations", "actions", "hidden"), 1))
        self.actor = mlp(sizes=[observations, hidden, hidden, actions], activation="tanh")
        self.critic = mlp(sizes=[observations, hidden, hidden, 1], activation="tanh")
        for network, gain in ((self.actor, LAST_LAYER_GAIN), (self.critic, 1.0)):
            layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
            for layer, layer_gain in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
                nn.init.orthogonal_(layer.weight, layer_gain)
                nn.init.zeros_(layer.bias)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        rows = observations.flatten(0, -2)
        logits, value = self.actor(rows), self.critic(rows)
        leading = observations.shape[:-1]
        return logits.unflatten(0, leading), value.squeeze(-1).unflatten(0, leading)


def actor_critic(*, observations: int, actions: int, hidden: int = 64) -> ActorCritic:
    """A policy and a value: observations (..., F) -> logits (..., A) and value (...).

    Args:
        observations: Numbers of an observation: 4 for ``CartPole-v1``.
        actions: Number of actions: 2 for ``CartPole-v1``.
        hidden: Width of the two hidden layers of each network.

    Raises UsageError for a value that cannot be used.
    """
    return ActorCritic(observations, actions, hidden)
