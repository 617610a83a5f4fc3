"""RL: an actor and its critic by policy gradient in a corridor, with discounted returns and an entropy bonus."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from zoo.hosts.corridor import CELLS, Corridors
from zoo.hosts.report import Report, Watch


class Actor(nn.Module):
    """Logits of the three moves, and the value of where one stands."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * CELLS, width), nn.Tanh())
        self.move = nn.Linear(width, 3)
        self.value = nn.Linear(width, 1)
        nn.init.orthogonal_(self.move.weight, gain=0.01)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(seen)
        return self.move(h), self.value(h).squeeze(-1)


def discounted(rewards: Tensor, alive: Tensor, gamma: float) -> Tensor:
    """Rewards (steps, corridors) to returns of the same shape; nothing counts after the end."""
    returns, following = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * following * alive[t]
        returns[t] = following
    return returns


def play(actor: nn.Module, corridors: Corridors, horizon: int) -> dict[str, Tensor]:
    seen, moves, rewards, running = [], [], [], []
    state = corridors.reset()
    alive = torch.ones(len(state))
    for _ in range(horizon):
        with torch.no_grad():
            logits, _ = actor(state)
        move = torch.distributions.Categorical(logits=logits).sample()
        after, reward, done = corridors.step(move)
        seen.append(state)
        moves.append(move)
        rewards.append(reward * alive)
        running.append(alive)
        alive = alive * (1 - done.float())
        state = after
    alive_after = torch.stack(running[1:] + [alive])
    batch = {"seen": torch.stack(seen), "moves": torch.stack(moves), "running": torch.stack(running)}
    batch["rewards"] = torch.stack(rewards)
    batch["returns"] = discounted(batch["rewards"], alive_after, gamma=0.95)
    return batch


def actor_loss(actor: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, values = actor(batch["seen"])
    chosen = torch.distributions.Categorical(logits=logits)
    mask = batch["running"]
    advantage = (batch["returns"] - values).detach()
    advantage = (advantage - advantage[mask > 0].mean()) / (advantage[mask > 0].std() + 1e-6)
    policy = -(chosen.log_prob(batch["moves"]) * advantage * mask).sum() / mask.sum()
    value = (F.smooth_l1_loss(values, batch["returns"], reduction="none") * mask).sum() / mask.sum()
    entropy = (chosen.entropy() * mask).sum() / mask.sum()
    return policy + 0.5 * value - 0.01 * entropy


@torch.no_grad()
def evaluate(actor: nn.Module, corridors: Corridors, horizon: int) -> float:
    actor.eval()
    state = corridors.reset()
    alive, total = torch.ones(len(state)), torch.zeros(len(state))
    for _ in range(horizon):
        move = actor(state)[0].argmax(dim=-1)
        state, reward, done = corridors.step(move)
        total = total + reward * alive
        alive = alive * (1 - done.float())
    actor.train()
    return total.mean().item()


def train(watch: Watch, seed: int, updates: int = 80, horizon: int = 12) -> Report:
    torch.manual_seed(seed)
    corridors, others = Corridors(48, seed), Corridors(256, seed + 1000)
    actor = Actor()
    optimizer = Adam(actor.parameters(), lr=1e-2, eps=1e-5)
    losses, reached = [], 0.0
    with watch(actor, optimizer):
        for update in range(updates):
            batch = play(actor, corridors, horizon)
            loss = actor_loss(actor, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            if update % 20 == 19:
                reached = evaluate(actor, others, horizon)
    return Report(actor, {"reward": reached}, losses)
