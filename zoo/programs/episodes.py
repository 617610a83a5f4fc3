"""Legal training of agents over whole episodes: one that remembers what it saw, one that changes its goals later."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.optim import RMSprop

from zoo.programs.training import Training


class Crossing:
    """A corridor of four fields. At its start one sees a side, at its end one must turn to it; a wrong move costs."""

    def __init__(self, walkers: int) -> None:
        self.place, self.side = torch.zeros(walkers, dtype=torch.long), torch.randint(2, (walkers,))

    def seen(self) -> Tensor:
        """(walkers, 3): the side where one begins, else zeros; whether one stands at the crossing."""
        start, end = self.place == 0, self.place == 3
        sides = F.one_hot(self.side, 2) * start.unsqueeze(1)
        return torch.cat([sides, end.unsqueeze(1)], 1).float()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards, and whose episode is over, of moves 0 and 1 to the sides and 2 ahead."""
        end, turns = self.place == 3, actions < 2
        over = end & turns
        reward = torch.where(over, torch.where(actions == self.side, 1.0, -0.5), torch.where(end | turns, -0.1, 0.0))
        self.place = torch.where(over, 0, (self.place + (~turns).long()).clamp(max=3))
        self.side = torch.where(over, torch.randint(2, self.side.shape), self.side)
        return reward, over.float()


class RecurrentActor(nn.Module):
    """Three actions and a value, by what it sees and what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.policy, self.value = nn.GRUCell(3, 32), nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, seen: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        memory = self.cell(seen, memory)
        return self.policy(memory), self.value(memory).squeeze(1), memory


def recurrent_actor_critic(t: Training) -> None:
    """Advantage actor-critic with a memory (Mnih et al., 2016), in one thread, with many walkers."""
    t.model, t.epochs, board = RecurrentActor(), 6, Crossing(32)
    t.optimizers_of = lambda training: [RMSprop(training.parameters(), lr=5e-3, alpha=0.99, eps=1e-5)]

    def play(training: Training) -> Iterator[Tensor]:
        model, (optimizer,) = training.model, training.optimizers
        memory = torch.zeros(32, 32)
        for _ in range(50 * training.epochs):
            memory, played = memory.detach(), []
            for _ in range(8):
                logits, value, memory = model(board.seen(), memory)
                policy = Categorical(logits=logits)
                actions = policy.sample()
                reward, over = board.step(actions)
                played.append((policy.log_prob(actions), policy.entropy(), value, reward, over))
                memory = memory * (1 - over).unsqueeze(1)
            with torch.no_grad():
                ahead, returns = model(board.seen(), memory)[1], []
                for *_, reward, over in reversed(played):
                    ahead = reward + 0.95 * (1 - over) * ahead
                    returns.insert(0, ahead)
            log_p, entropy, values, rewards, _ = (torch.stack(each) for each in zip(*played))
            gain = torch.stack(returns) - values
            loss = 0.5 * gain.square().mean() - (log_p * gain.detach()).mean() - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            yield -rewards.mean()

    t.loop, t.loaded = play, False


BITS = 7


@torch.no_grad()
def _flipped(model: nn.Module, episodes: int, chance: float) -> tuple[Tensor, Tensor, Tensor]:
    """States (BITS + 1, n, BITS), actions (BITS, n) and goals (n, BITS): each action turns one bit."""
    states, goals = [torch.randint(2, (episodes, BITS)).float()], torch.randint(2, (episodes, BITS)).float()
    actions = []
    for _ in range(BITS):
        best = model(torch.cat([states[-1], goals], 1)).argmax(1)
        free = torch.rand(episodes) < chance
        actions.append(torch.where(free, torch.randint(BITS, (episodes,)), best))
        states.append((states[-1] - F.one_hot(actions[-1], BITS)).abs())
    return torch.stack(states), torch.stack(actions), goals


def _relabelled(states: Tensor, actions: Tensor, goals: Tensor) -> tuple[Tensor, ...]:
    """Steps of episodes: state, action, next state, goal; once with the goal that was, four times with one reached."""
    rows, found = torch.arange(len(goals)), []
    for step in range(BITS):
        later = [states[torch.randint(step + 1, BITS + 1, (len(goals),)), rows] for _ in range(4)]
        found.extend((states[step], actions[step], states[step + 1], goal) for goal in (goals, *later))
    return tuple(torch.cat(each) for each in zip(*found))


def hindsight(t: Training) -> None:
    """Hindsight experience replay (Andrychowicz et al., 2017): what was reached is taken for what was wanted."""
    t.model, t.epochs, t.lr = nn.Sequential(nn.Linear(2 * BITS, 128), nn.ReLU(), nn.Linear(128, BITS)), 5, 2e-3
    slow = copy.deepcopy(t.model).requires_grad_(False)

    def play(training: Training) -> Iterator[Tensor]:
        model, (optimizer,) = training.model, training.optimizers
        memory: tuple[Tensor, ...] = ()
        for _ in range(12 * training.epochs):
            played = _flipped(model, 16, 0.2)
            fresh = _relabelled(*played)
            memory = tuple(torch.cat(both)[-20_000:] for both in zip(memory, fresh)) if memory else fresh
            for _ in range(16):
                rows = torch.randint(len(memory[0]), (128,))
                state, action, after, goal = (each[rows] for each in memory)
                there = (after == goal).all(1).float()
                with torch.no_grad():
                    ahead = slow(torch.cat([after, goal], 1)).amax(1)
                    target = (there - 1 + 0.98 * (1 - there) * ahead).clamp(-50.0, 0.0)
                value = model(torch.cat([state, goal], 1)).gather(1, action.unsqueeze(1)).squeeze(1)
                optimizer.zero_grad()
                loss = F.mse_loss(value, target)
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                for kept, new in zip(slow.parameters(), model.parameters()):
                    kept.lerp_(new, 0.3)
            yield 1 - (played[0] == played[2]).all(2).any(0).float().mean()

    t.loop, t.loaded = play, False
