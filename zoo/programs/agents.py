"""Legal training of agents, which make their data themselves: replays, slow targets, traces, searches, quantiles."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

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


def eligibility_traces(t: Training) -> None:
    """TD(lambda) with a network (Sutton, 1988; Tesauro, 1992): gradients of the past fade, each surprise is for all."""
    states, decay = 7, 0.7
    truth = torch.linspace(-1, 1, states + 2)[1:-1]
    t.model, t.epochs = nn.Sequential(nn.Linear(states, 32), nn.Tanh(), nn.Linear(32, 1)), 8
    nn.init.zeros_(t.model[2].weight)
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.03)]
    t.scheduler_of = lambda optimizer: LambdaLR(optimizer, lambda episode: 1 / (1 + episode / 15))
    seen = torch.eye(states)

    def walk(training: Training) -> Iterator[Tensor]:
        model, (optimizer,) = training.model, training.optimizers
        weights = list(model.parameters())
        for _ in range(30 * training.epochs):
            place, traces = states // 2, [torch.zeros_like(p) for p in weights]
            while 0 <= place < states:
                value = model(seen[place])
                slopes = torch.autograd.grad(value.sum(), weights)
                traces = [decay * trace + slope for trace, slope in zip(traces, slopes)]
                place += 1 if float(torch.rand(())) < 0.5 else -1
                with torch.no_grad():
                    ahead = model(seen[place]) if 0 <= place < states else torch.tensor(1.0 if place > 0 else -1.0)
                surprise = float(ahead) - value.item()
                for p, trace in zip(weights, traces):
                    p.grad = -surprise * trace
                optimizer.step()
            training.scheduler.step()
            with torch.no_grad():
                yield (model(seen).squeeze(1) - truth).square().mean().sqrt()

    t.loop, t.loaded = walk, False


@torch.no_grad()
def searched(board: Board, model: nn.Module, depth: int = 3) -> Tensor:
    """What each of four actions brings (walkers, 4), by all plans of ``depth`` moves and the value at their ends."""
    plans, walkers = torch.tensor(list(product(range(4), repeat=depth))), len(board.place)
    ahead = Board(0)
    ahead.place = board.place.repeat_interleave(len(plans), 0)
    worth, going = torch.zeros(len(ahead.place)), torch.ones(len(ahead.place))
    for number in range(depth):
        reward, arrived = ahead.step(plans[:, number].repeat(walkers))
        worth += 0.95**number * going * reward
        going = going * (1 - arrived)
    worth += 0.95**depth * going * model(ahead.seen())[:, 4]
    return worth.view(walkers, 4, -1).amax(2)


def expert_iteration(t: Training) -> None:
    """Expert iteration (Anthony et al., 2017): a search that uses the network is the expert that it imitates."""
    t.model = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 5))  # four actions and a value
    t.epochs, t.lr, board = 5, 1e-2, Board(16)

    def play(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        memory: list[tuple[Tensor, Tensor]] = []
        for _ in range(16 * training.epochs):
            rewards = []
            for _ in range(4):
                worth = searched(board, training.model)
                memory = [*memory, (board.seen(), worth)][-64:]
                with torch.no_grad():
                    policy = Categorical(logits=training.model(board.seen())[:, :4])
                rewards.append(board.step(policy.sample())[0])
            for rows in torch.randperm(len(memory)).split(8)[:4]:
                seen, worth = (torch.cat(each) for each in zip(*(memory[number] for number in rows.tolist())))
                out = training.model(seen)
                expert = (worth / 0.05).softmax(1)
                loss = F.cross_entropy(out[:, :4], expert) + 0.5 * F.mse_loss(out[:, 4], worth.amax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            yield -torch.stack(rewards).mean()

    t.loop, t.loaded = play, False


def returns_in_quantiles(t: Training) -> None:
    """QR-DQN (Dabney et al., 2018): a value is a distribution, of which quantiles are learned against quantiles."""
    t.model, t.epochs = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 4 * 16), nn.Unflatten(1, (4, 16))), 5
    slow, board = copy.deepcopy(t.model).requires_grad_(False), Board(16)
    t.optimizers_of = lambda training: [Adam(training.parameters(), lr=3e-3, eps=0.01 / 32)]
    levels = (torch.arange(16) + 0.5) / 16

    def play(training: Training) -> Iterator[Tensor]:
        (optimizer,), memory = training.optimizers, []
        for step in range(100 * training.epochs):
            if step % 25 == 0:
                slow.load_state_dict(training.model.state_dict())
            before = board.seen()
            with torch.no_grad():
                best = training.model(before).mean(2).argmax(1)
            actions = torch.where(torch.rand(16) < max(0.05, 1 - step / 120), torch.randint(4, (16,)), best)
            reward, arrived = board.step(actions)
            memory = [*memory, (before, actions, reward, arrived, board.seen())][-300:]
            replayed = [memory[number] for number in torch.randint(len(memory), (6,)).tolist()]
            seen, taken, paid, done, after = (torch.cat(each) for each in zip(*replayed))
            with torch.no_grad():
                ahead = slow(after)
                ahead = ahead[torch.arange(len(after)), ahead.mean(2).argmax(1)]
                target = paid.unsqueeze(1) + 0.95 * (1 - done).unsqueeze(1) * ahead
            quantiles = training.model(seen)[torch.arange(len(seen)), taken]
            error = target.unsqueeze(1) - quantiles.unsqueeze(2)  # (rows, quantiles, targets)
            bent = F.huber_loss(error, torch.zeros_like(error), reduction="none")
            loss = ((levels.unsqueeze(1) - (error < 0).float()).abs() * bent).mean(2).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield -reward.mean()

    t.loop, t.loaded = play, False
