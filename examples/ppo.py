"""PPO (Schulman et al. 2017): a step plays episodes, then learns from them in several passes, part by part."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from corridor import play, policy
from torch import Tensor, nn

import trainwright as tw

PASSES, PARTS, CLIP = 3, 4, 0.2


class Agent(nn.Module):
    """The policy, and the value that is expected from a place on."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = policy()
        self.value = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def ppo_loss(agent: nn.Module, seen: Tensor, actions: Tensor, returns: Tensor, before: Tensor) -> Tensor:
    """The clipped objective and the error of the value."""
    value = agent.value(seen).squeeze(-1)
    gain = (returns - value).detach()
    ratio = (torch.distributions.Categorical(logits=agent.policy(seen)).log_prob(actions) - before).exp()
    objective = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    return 0.5 * F.mse_loss(value, returns) - objective.mean()


def step(state: tw.TrainState, batch: tw.StepBatch) -> tw.Loss:
    (seeds,) = batch.data
    played = play(state.model.policy, seeds)
    seen, actions, returns = (each.flatten(0, 1) for each in played)
    with torch.no_grad():
        before = torch.distributions.Categorical(logits=state.model.policy(seen)).log_prob(actions)
    for _ in range(PASSES):
        for rows in torch.randperm(len(seen), device=seen.device).chunk(PARTS):
            loss = ppo_loss(state.model, seen[rows], actions[rows], returns[rows], before[rows])
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
    return tw.Loss(loss, 1.0, {"reward": played.returns[0].mean()})


def main(steps: int = 50, resume: Path | None = None) -> tw.Result:
    torch.manual_seed(0)
    seeds = torch.arange(4096)
    return tw.fit(Agent(), (seeds,), advance=step, batch=64, lr=5e-3, schedule="cosine", steps=steps, resume=resume)


if __name__ == "__main__":
    main()
