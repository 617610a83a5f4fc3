"""Legal training of agents, which make their data themselves: replayed steps, slow targets, clipped ratios."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from zoo.programs.training import Training


class Board:
    """Walkers on five by five fields. A step costs; the corner pays, and who gets there begins anew elsewhere."""

    moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])

    def __init__(self, walkers: int) -> None:
        self.place = torch.randint(4, (walkers, 2))

    def seen(self) -> Tensor:
        return F.one_hot(5 * self.place[:, 0] + self.place[:, 1], 25).float()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards, and who has arrived."""
        place = (self.place + self.moves[actions]).clamp(0, 4)
        arrived = (place == 4).all(1)
        self.place = torch.where(arrived.unsqueeze(1), torch.randint(4, place.shape), place)
        return torch.where(arrived, 1.0, -0.05), arrived.float()


def deep_q(t: Training) -> None:
    """Deep Q-learning (Mnih et al., 2015; van Hasselt et al., 2016): a replay buffer and a target network."""
    t.model, t.epochs = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4)), 5
    slow, board = copy.deepcopy(t.model).requires_grad_(False), Board(16)

    def play(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        model, memory = training.model, []
        for step in range(100 * training.epochs):
            if step % 50 == 0:
                slow.load_state_dict(model.state_dict())
            before = board.seen()
            with torch.no_grad():
                best = model(before).argmax(1)
            actions = torch.where(torch.rand(16) < max(0.1, 1 - step / 150), torch.randint(4, (16,)), best)
            reward, arrived = board.step(actions)
            memory = [*memory, (before, actions, reward, arrived, board.seen())][-200:]

            chosen = [memory[number] for number in torch.randint(len(memory), (8,)).tolist()]
            seen, taken, paid, done, after = (torch.cat(each) for each in zip(*chosen))
            with torch.no_grad():
                ahead = slow(after).gather(1, model(after).argmax(1, keepdim=True)).squeeze(1)
                target = paid + 0.95 * (1 - done) * ahead
            loss = F.smooth_l1_loss(model(seen).gather(1, taken.unsqueeze(1)).squeeze(1), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            yield -reward.mean()

    t.loop, t.loaded = play, False


def clipped_policy(t: Training) -> None:
    """Proximal policy optimization (Schulman et al., 2017): several epochs on what was played, ratios clipped."""
    t.model = nn.Sequential(nn.Linear(25, 64), nn.Tanh(), nn.Linear(64, 5))  # four actions and a value
    t.epochs, board = 5, Board(16)

    def rollout(model: nn.Module) -> tuple[Tensor, ...]:
        played = []
        for _ in range(16):
            seen = board.seen()
            out = model(seen)
            policy = Categorical(logits=out[:, :4])
            actions = policy.sample()
            played.append((seen, actions, policy.log_prob(actions), out[:, 4], *board.step(actions)))
        seen, actions, log_p, values, rewards, arrived = (torch.stack(each) for each in zip(*played))
        following = torch.cat([values[1:], model(board.seen())[:, 4].unsqueeze(0)])
        surprise = rewards + 0.95 * (1 - arrived) * following - values
        gains = [torch.zeros(16)]
        for number in reversed(range(16)):
            gains.insert(0, surprise[number] + 0.95 * 0.9 * (1 - arrived[number]) * gains[0])
        gain = torch.stack(gains[:-1])
        return seen, actions, log_p, gain, gain + values, rewards

    def play(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for _ in range(8 * training.epochs):
            with torch.no_grad():
                *parts, rewards = (each.flatten(0, 1) for each in rollout(training.model))
            for rows in [each for _ in range(3) for each in torch.randperm(256).split(64)]:
                seen, actions, log_p, gain, returns = (part[rows] for part in parts)
                out = training.model(seen)
                policy = Categorical(logits=out[:, :4])
                ratio = (policy.log_prob(actions) - log_p).exp()
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = 0.5 * F.mse_loss(out[:, 4], returns) - surrogate - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
                optimizer.step()
            yield -rewards.mean()

    t.loop, t.loaded = play, False
