"""A multi-layer perceptron. Shapes: B batch, K outputs; the input has any shape with sizes[0] numbers per sample."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from trainwright.errors import UsageError, require_choice
from trainwright.models.options import require_count, require_dropout

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


class MLP(nn.Module):
    """x -> logits_BK: flatten, then linear, activation, dropout per hidden size, then a linear ``head``."""

    def __init__(self, layers: OrderedDict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(layers)

    def forward(self, x: Tensor) -> Tensor:
        logits_BK: Tensor = self.layers(x.flatten(1))
        return logits_BK


def mlp(*, sizes: Sequence[int], activation: str = "relu", dropout: float = 0.0) -> MLP:
    """Linear layers with an activation between them: x -> logits_BK. The input is flattened.

    Args:
        sizes: Number of features from input to output: ``[20, 64, 10]`` has one hidden layer.
        activation: ``relu``, ``gelu``, ``silu`` or ``tanh``.
        dropout: Dropout after each hidden layer.

    Raises UsageError for a value that cannot be used.
    """
    if len(sizes) < 2 or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise UsageError(f"sizes must be two or more counts; got {sizes!r}", remedy="try sizes=[20, 64, 10]")
    require_choice("activation", activation, ACTIVATIONS)
    require_dropout(dropout)
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for index, (before, after) in enumerate(pairwise(sizes[:-1])):
        modules[f"linear{index}"] = nn.Linear(before, after)
        modules[f"activation{index}"] = ACTIVATIONS[activation]()
        if dropout:
            modules[f"dropout{index}"] = nn.Dropout(dropout)
    modules["head"] = nn.Linear(sizes[-2], sizes[-1])
    return MLP(modules)


LAST_LAYER_GAIN = 0.01
"""Gain of the last layer of the policy, so that initial probabilities are nearly equal (arXiv 2005.12729)."""


class ActorCritic(nn.Module):
    """observations (..., F) -> logits (..., A) and value (...), by two networks with two hidden layers each."""

    def __init__(self, observations: int, actions: int, hidden: int) -> None:
        super().__init__()
        require_count("observations", observations)
        require_count("actions", actions)
        require_count("hidden", hidden)
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
        observations: Number of values in an observation: 4 for ``CartPole-v1``.
        actions: Number of actions: 2 for ``CartPole-v1``.
        hidden: Width of the two hidden layers of each network.

    Raises UsageError for a value that cannot be used.
    """
    return ActorCritic(observations, actions, hidden)
