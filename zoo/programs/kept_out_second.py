"""A second dozen that is kept out: six techniques that bend the usual rules, and the table of all twelve."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from zoo.programs import kept_out_second_everyday as everyday
from zoo.programs.training import Batch, Training


class _SumsTo(torch.autograd.Function):
    """Sigmoids of scores that are moved together until each row sums to k; the gradient is that of the solution."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: int) -> Tensor:
        low, high = -scores.amax(1, keepdim=True) - 10, -scores.amin(1, keepdim=True) + 10
        for _ in range(40):
            middle = (low + high) / 2
            few = (scores + middle).sigmoid().sum(1, keepdim=True) < k
            low, high = torch.where(few, middle, low), torch.where(few, high, middle)
        out = (scores + (low + high) / 2).sigmoid()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        slope = out * (1 - out)
        common = (slope * grads[0]).sum(1, keepdim=True) / slope.sum(1, keepdim=True)
        return slope * (grads[0] - common), None


def limited_labels(t: Training) -> None:
    """Limited multi-label projection (Amos et al., 2019): two guesses a row, by an implicit gradient of a root."""
    t.epochs = 6

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        chances = _SumsTo.apply(model(x), 2)
        return -chances.gather(1, y.unsqueeze(1)).clamp_min(1e-8).log().mean()

    t.loss = loss


class _LinearPosterior:
    """What is believed about the rewards of one arm, linear in the features."""

    def __init__(self, size: int, noise: float = 0.3) -> None:
        self.noise, self.mean, self.root = noise, torch.zeros(size), torch.eye(size)

    def fit(self, features: Tensor, rewards: Tensor) -> None:
        precision = torch.eye(features.shape[1]) + features.T @ features / self.noise**2
        covariance = torch.linalg.inv(precision)
        self.mean = covariance @ (features.T @ rewards) / self.noise**2
        self.root = torch.linalg.cholesky((covariance + covariance.T) / 2 + 1e-6 * torch.eye(len(covariance)))

    def drawn(self) -> Tensor:
        return self.mean + self.root @ torch.randn(len(self.mean))


def thompson_bandit(t: Training) -> None:
    """Neural linear bandit (Riquelme et al., 2018): arms by Bayesian regression on features that learn from rewards."""
    arms, (contexts, best) = 5, t.data.tensors
    best = best // 2
    body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.LayerNorm(32))
    head = nn.Linear(32, arms)
    t.model, t.loaded = nn.Sequential(body, head), False

    def play(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        beliefs = [_LinearPosterior(32) for _ in range(arms)]
        seen: list[tuple[Tensor, Tensor, Tensor]] = []
        for turn in range(300):
            x_now = torch.randint(len(contexts), (32,))
            with torch.no_grad():
                features = body(contexts[x_now])
                chosen = torch.stack([features @ each.drawn() for each in beliefs], 1).argmax(1)
            rewards = (chosen == best[x_now]).float()
            seen.append((contexts[x_now], chosen, rewards))
            x, arm, got = (torch.cat(each) for each in zip(*seen))
            for _ in range(2):
                some = torch.randint(len(x), (64,))
                error = F.mse_loss(training.model(x[some]).gather(1, arm[some].unsqueeze(1)).squeeze(1), got[some])
                optimizer.zero_grad()
                error.backward()
                optimizer.step()
            if turn % 5 == 4:
                with torch.no_grad():
                    features = body(x)
                for number, belief in enumerate(beliefs):
                    belief.fit(features[arm == number], got[arm == number])
            yield 1 - rewards.mean()  # the regret

    t.loop = play


def least_energy(t: Training) -> None:
    """Deep Ritz (E and Yu, 2018): Poisson's equation by the least energy, at points drawn anew; it goes below zero."""
    t.model = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    t.loaded = False

    def force(at: Tensor) -> Tensor:
        return 2 * math.pi**2 * (math.pi * at).sin().prod(1)

    def solve(training: Training) -> Iterator[Tensor]:
        (optimizer,), u = training.optimizers, training.model
        for _ in range(500):
            inside, edge = torch.rand(256, 2, requires_grad=True), torch.rand(128, 2)
            edge[torch.arange(128), torch.randint(2, (128,))] = torch.randint(2, (128,)).float()
            value = u(inside).squeeze(1)
            (slope,) = torch.autograd.grad(value.sum(), inside, create_graph=True)
            energy = (slope.square().sum(1) / 2 - force(inside.detach()) * value).mean()
            loss = energy + 100 * u(edge).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach()

    t.loop = solve


class ComplexRecurrence(nn.Module):
    """Complex states that turn and shrink at their own rates."""

    def __init__(self, size: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.empty(size).uniform_(0.7, 0.99).log().neg().log())
        self.angle = nn.Parameter(torch.empty(size).uniform_(0.1, 2.5))
        self.enter = nn.Parameter(torch.randn(size, dtype=torch.cfloat))
        self.mix = nn.Parameter(torch.randn(size, size, dtype=torch.cfloat) / size**0.5)
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.polar(self.decay.exp().neg().exp(), self.angle)
        scale = (1 - turn.abs().square()).sqrt()
        state = torch.zeros(len(x), len(turn), dtype=torch.cfloat)
        size = torch.zeros(len(x), len(turn))
        for now in x.unbind(1):
            state = turn * state + scale * self.enter * now
            size = size + ((state @ self.mix).abs().square() + 1e-6).sqrt()
        return self.head(self.norm(size / x.shape[1]))


def complex_recurrence(t: Training) -> None:
    """Linear recurrent unit (Orvieto et al., 2023): a diagonal recurrence with complex parameters."""
    t.model, t.epochs, t.lr = ComplexRecurrence(), 6, 5e-3


def shrunk_and_perturbed(t: Training) -> None:
    """Shrink and perturb (Ash and Adams, 2020): more data come; weights shrink, get noise, and their Adam forgets."""
    rounds, t.loaded, make = 4, False, copy.deepcopy(t.model)

    @torch.no_grad()
    def renew(model: nn.Module) -> None:
        for module in make.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
                module.reset_parameters()
        for mine, fresh in zip(model.parameters(), make.parameters()):
            mine.mul_(0.5).add_(fresh, alpha=0.3)

    def go_on(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for number in range(1, rounds + 1):
            if number > 1:
                renew(training.model)
                optimizer.state.clear()
            arrived: Subset[Any] = Subset(training.data, range(len(training.data) * number // rounds))
            for _ in range(5):
                for batch in DataLoader(arrived, 32, shuffle=True, drop_last=True):
                    yield training.plain_update(tuple(batch))

    t.loop = go_on


class TwoBranches(nn.Module):
    """Two regressions, how common each is, and how far samples lie from them; the last two have no gradient."""

    share: Tensor
    spread: Tensor

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(make() for _ in range(2))
        self.register_buffer("share", torch.full((2,), 0.5))
        self.register_buffer("spread", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([each(x) for each in self.branches], 1)

    @torch.no_grad()
    def responsibilities(self, x: Tensor, y: Tensor) -> Tensor:
        z = (y - self(x)) / self.spread
        found = (self.share.log() - self.spread.log() - z.square() / 2).softmax(1)
        self.share = found.mean(0).clamp_min(0.05)
        self.spread = ((found * (y - self(x)).square()).sum(0) / found.sum(0)).sqrt().clamp_min(0.1)
        return found


def expectation_maximisation(t: Training) -> None:
    """Mixture of regressions by EM (Jordan and Jacobs, 1994): fixed responsibilities, then some steps of Adam."""
    x, y = t.data.tensors
    y = torch.where(torch.rand(len(y), 1) < 0.4, y + 2, -y - 2)
    model = TwoBranches(lambda: nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 1)))
    t.model, t.data, t.loaded = model, TensorDataset(x, y), False

    def alternate(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for _ in range(40):
            owners = model.responsibilities(x, y)  # E
            for some in torch.randperm(len(x))[:640].split(64):  # M, not to its end
                loss = (owners[some] * (y[some] - model(x[some])).square()).sum(1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield loss.detach()

    t.loop = alternate


SECOND: dict[Callable[[Training], None], str] = {
    limited_labels: "table",
    thompson_bandit: "table",
    least_energy: "regress",
    complex_recurrence: "series",
    shrunk_and_perturbed: "image",
    expectation_maximisation: "regress",
    everyday.trainer_class: "image",
    everyday.several_heads: "regress",
    everyday.ragged_series: "series",
    everyday.callbacks: "table",
    everyday.pretraining_script: "text",
    everyday.anomalies: "rebuild",
}
"""The techniques, and the task that each fits."""
