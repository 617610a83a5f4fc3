"""PPO on CartPole of gymnasium (pip install gymnasium), with the built-in step, model and data."""

from __future__ import annotations

from pathlib import Path

import torch

import trainwright as tw
from trainwright.data.episodes import episodes
from trainwright.engine.policy_gradient import PPO, Reinforce
from trainwright.models.mlp import actor_critic

# score: episode_return >= 150    the mean over 20 episodes of the validation; at best 500, 22 for a random policy


def main(steps: int = 60, resume: Path | None = None) -> tw.Result:
    torch.manual_seed(0)
    return tw.fit(
        actor_critic(observations=4, actions=2),
        episodes(count=4096),
        Reinforce("CartPole-v1"),  # evaluates the validation episodes
        advance=PPO("CartPole-v1", epochs=10, max_grad_norm=10.0),
        val=episodes("val", count=20),
        batch=8,
        steps=steps,
        lr=1e-3,
        schedule="cosine",
        resume=resume,
    )


if __name__ == "__main__":
    print(main())
