"""Policy gradient: each step plays episodes, and makes good actions more likely."""

import torch
import trainwright as tw
from torch import Tensor, nn
from torch.distributions import Categorical

from data import MAX_MOVES, play
from model import make_policy

DISCOUNT = 0.99
STEPS, PLAYERS = 60, 16


def discounted(rewards: Tensor) -> Tensor:
    """Return the discounted sum of rewards from each move on: (moves, players)."""
    returns = torch.zeros_like(rewards)
    later = torch.zeros_like(rewards[0])
    for move in reversed(range(len(rewards))):
        later = rewards[move] + DISCOUNT * later
        returns[move] = later
    return returns


def loss(model: nn.Module, batch: tuple[Tensor]) -> tw.Loss:
    (seeds,) = batch
    played = play(model, seeds)
    returns, alive = discounted(played.rewards), played.rewards > 0
    gain = (returns - returns[alive].mean()) / (returns[alive].std() + 1e-6)
    log_prob = Categorical(logits=model(played.observations)).log_prob(played.actions)
    total = -(log_prob * gain)[alive].sum() / MAX_MOVES
    return tw.Loss(total, float(len(seeds)), {"reward": played.rewards.sum()})


def main() -> None:
    torch.manual_seed(0)
    policy = make_policy()
    seeds = torch.arange(STEPS * PLAYERS)  # each is the seed of one episode
    tw.fit(
        policy,
        (seeds,),
        loss,
        batch=PLAYERS,
        steps=STEPS,
        lr=1e-2,
        schedule="linear",
        clip=1.0,
        name="rl",
    )
    rewards = play(policy, torch.arange(32) + 10**6, greedy=True).rewards.sum(0)
    print(
        f"reward {rewards.mean():.1f} of {MAX_MOVES}, over 32 episodes of other seeds"
    )


if __name__ == "__main__":
    main()
