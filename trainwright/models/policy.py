"""A policy and a value for reinforcement learning. Shapes: F numbers of an observation, A actions."""

from __future__ import annotations

from torch import Tensor, nn

from trainwright.models.mlp import mlp
from trainwright.models.options import require_counts

SMALL_GAIN = 0.01
"""Of the last layer of the policy, so that it begins with nearly equal probabilities (arXiv 2005.12729)."""


class ActorCritic(nn.Module):
    """seen (..., F) -> logits (..., A) and value (...), by two networks with two hidden layers each."""

    def __init__(self, observations: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.observations, self.actions, self.hidden = observations, actions, hidden
        require_counts(self, dict.fromkeys(("observations", "actions", "hidden"), 1))
        self.actor = mlp(sizes=[observations, hidden, hidden, actions], activation="tanh")
        self.critic = mlp(sizes=[observations, hidden, hidden, 1], activation="tanh")
        for network, gain in ((self.actor, SMALL_GAIN), (self.critic, 1.0)):
            linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
            for module, own in zip(linear, (2**0.5, 2**0.5, gain)):
                nn.init.orthogonal_(module.weight, own)
                nn.init.zeros_(module.bias)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        rows = seen.flatten(0, -2)
        logits, value = self.actor(rows), self.critic(rows)
        return logits.unflatten(0, seen.shape[:-1]), value.squeeze(-1).unflatten(0, seen.shape[:-1])


def actor_critic(*, observations: int, actions: int, hidden: int = 64) -> ActorCritic:
    """A policy and a value: seen (..., F) -> logits (..., A) and value (...).

    Args:
        observations: Numbers of an observation: 4 for ``CartPole-v1``.
        actions: Number of actions: 2 for ``CartPole-v1``.
        hidden: Width of the two hidden layers of each network.

    Raises UsageError for a value that cannot be used.
    """
    return ActorCritic(observations, actions, hidden)
