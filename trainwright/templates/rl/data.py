"""Episodes of CartPole, from gymnasium. Put your own environment here."""

from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

MAX_MOVES = 500


class Episodes(NamedTuple):
    """Played games as tensors, each of shape (moves, players, ...)."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    """0 after the end of an episode."""


def make_env() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=MAX_MOVES)


@torch.no_grad()
def play(policy: nn.Module, seeds: Tensor, greedy: bool = False) -> Episodes:
    """Play one episode for each seed."""
    envs = SyncVectorEnv(
        [make_env] * len(seeds)
    )  # a finished environment starts a new episode
    observation, _ = envs.reset(seed=seeds.tolist())
    alive = np.ones(len(seeds), dtype=bool)
    moves = []
    while alive.any():
        seen = torch.as_tensor(observation)
        logits = policy(seen)
        action = logits.argmax(1) if greedy else Categorical(logits=logits).sample()
        observation, reward, fell, out_of_time, _ = envs.step(action.numpy())
        moves.append((seen.clone(), action, torch.as_tensor(reward * alive).float()))
        alive &= ~(fell | out_of_time)
    envs.close()
    return Episodes(*(torch.stack(each) for each in zip(*moves, strict=True)))
