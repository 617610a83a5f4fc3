"""A small environment for reinforce.py and ppo.py: a walk along a corridor, played by many players at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

GOAL, MOST = 3, 8
"""How far the goal is to the right, and how many moves there are."""


class Episodes(NamedTuple):
    """What was played, each of shape (moves, players): what was seen, done, and earned from there on."""

    seen: Tensor
    actions: Tensor
    returns: Tensor


def policy() -> nn.Module:
    """From (place, time) to the logits of going left and right."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


@torch.no_grad()
def play(model: nn.Module, seeds: Tensor) -> Episodes:
    """One episode for each seed, from a place that follows from it. Each move that ends at the goal earns 1."""
    place, seen, actions, rewards = seeds % GOAL - 1, [], [], []
    for move in range(MOST):
        seen.append(torch.stack([place / GOAL, torch.full_like(place, move) / MOST], dim=1))
        actions.append(torch.distributions.Categorical(logits=model(seen[-1])).sample())
        place = (place + 2 * actions[-1] - 1).clamp(-GOAL, GOAL)
        rewards.append((place == GOAL).float())
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return Episodes(torch.stack(seen), torch.stack(actions), returns)
