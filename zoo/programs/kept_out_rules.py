"""Adjoints, tasks within tasks and agents for the end: nobody may look at them while laws are written."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.optim import SGD

from zoo.programs.places import behind_first
from zoo.programs.training import Training

State = Sequence[Tensor]


def _runge_kutta(slope: Callable[[State], State], state: State, step: float) -> State:
    """One step of the classical method of fourth order."""

    def at(share: float, slopes: State) -> State:
        return [s + share * step * k for s, k in zip(state, slopes)]

    one = slope(state)
    two = slope(at(0.5, one))
    three = slope(at(0.5, two))
    four = slope(at(1.0, three))
    return [s + step / 6 * (a + 2 * b + 2 * c + d) for s, a, b, c, d in zip(state, one, two, three, four)]


class Adjoint(torch.autograd.Function):
    """The state at time 1; the backward pass integrates state and gradients from there to time 0."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, z: Tensor, field: nn.Module, steps: int, *weights: Tensor
    ) -> Tensor:
        for _ in range(steps):
            (z,) = _runge_kutta(lambda state: [field(state[0])], [z], 1 / steps)
        ctx.save_for_backward(z, *weights)
        ctx.field, ctx.steps = field, steps
        return z

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        z, *weights = ctx.saved_tensors

        def slope(state: State) -> State:
            with torch.enable_grad():
                at = state[0].detach().requires_grad_()
                moved = ctx.field(at)
                slopes = torch.autograd.grad(moved, (at, *weights), state[1])
            return [moved.detach(), *(-each for each in slopes)]

        state: State = [z, gradient, *(torch.zeros_like(each) for each in weights)]
        for _ in range(ctx.steps):
            state = _runge_kutta(slope, state, -1 / ctx.steps)
        return state[1], None, None, *state[2:]


class NeuralOde(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(features, features), nn.Tanh(), nn.Linear(features, features))

    def forward(self, x: Tensor) -> Tensor:
        return Adjoint.apply(x, self.field, 5, *self.field.parameters())


def adjoint(t: Training) -> None:
    """A neural ordinary differential equation (Chen et al., 2018), with the gradient of the adjoint method."""
    behind_first(t, NeuralOde)


class Recomputed(torch.autograd.Function):
    """Residual blocks in two streams; only the output is kept, and what was before is computed from it."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, blocks: Sequence[nn.Module], *weights: Tensor
    ) -> Tensor:
        one, two = x.chunk(2, 1)
        for block in blocks:
            one, two = two, one + block(two)
        ctx.blocks = blocks
        ctx.save_for_backward(one, two)
        return torch.cat([one, two], 1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        one, two = ctx.saved_tensors
        to_one, to_two = gradient.chunk(2, 1)
        found: list[Tensor] = []
        for block in reversed(ctx.blocks):
            with torch.enable_grad():
                before = one.detach().requires_grad_()
                added = block(before)
                slope, *slopes = torch.autograd.grad(added, (before, *block.parameters()), to_two)
            one, two = two - added.detach(), one
            to_one, to_two = to_two, to_one + slope
            found[:0] = slopes
        return torch.cat([to_one, to_two], 1), None, *found


class TwoStreams(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        half = features // 2
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(half, half), nn.ReLU(), nn.Linear(half, half)) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(x, list(self.blocks), *self.blocks.parameters())


def reversible(t: Training) -> None:
    """RevNet (Gomez et al., 2017): activations are not kept, the backward pass computes them from the output."""
    behind_first(t, TwoStreams)


def waves() -> tuple[Tensor, Tensor]:
    """A task: 20 points (20, 1) of a sine with an amplitude and a phase of its own."""
    x = 10 * torch.rand(20, 1) - 5
    return x, (0.5 + 1.5 * torch.rand(())) * torch.sin(x + math.pi * torch.rand(()))


def reptile(t: Training) -> None:
    """Reptile (Nichol et al., 2018): the weights go a part of the way to where some steps on one task lead."""
    t.model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    t.epochs = 20
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.02)]

    def tasks(training: Training) -> Iterator[Tensor]:
        number, losses = 60 * training.epochs, []
        for task in range(number):
            before = copy.deepcopy(training.model.state_dict())
            batch = waves()
            losses += [training.plain_update(batch) for _ in range(8)]
            with torch.no_grad():
                for name, p in training.model.named_parameters():
                    p.copy_(before[name].lerp(p, 1 - task / number))
            if task % 5 == 4:
                yield torch.stack(losses).mean()
                losses.clear()

    t.loop, t.loaded = tasks, False


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
