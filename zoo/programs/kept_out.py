"""Losses, bounds and targets that nobody may look at while laws are written: they are measured at the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import TensorDataset

from zoo.hosts.worlds import points
from zoo.programs.densities import energy_distance
from zoo.programs.training import Batch, Training


def mutual_information(t: Training) -> None:
    """MINE (Belghazi et al., 2018): a bound on what x tells of y; a running mean takes the bias off its gradient."""
    x, noise = torch.randn(2, 2048, 1)
    t.data = TensorDataset(x, 0.9 * x + 0.19**0.5 * noise)  # 0.83 nats
    t.model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    t.epochs, t.batch_size, t.lr, running = 8, 128, 1e-3, 1.0

    def update(training: Training, batch: Batch) -> Tensor:
        nonlocal running
        x, y = batch
        together = training.model(torch.cat([x, y], 1)).mean()
        apart = training.model(torch.cat([x, y[torch.randperm(len(y))]], 1)).exp().mean()
        running = 0.95 * running + 0.05 * float(apart.detach())
        (optimizer,) = training.optimizers
        optimizer.zero_grad()
        (apart / running - together).backward()
        optimizer.step()
        return (apart.log() - together).detach()

    t.update = update


def drawn_quantiles(t: Training) -> None:
    """All quantiles at once (Tagasovska and Lopez-Paz, 2019): each row draws a level, and pays the pinball loss."""
    t.model, t.epochs = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), 8

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = (each.repeat(4, 1) for each in batch)
        level = torch.rand(len(x), 1)
        short = y - model(torch.cat([x, 2 * level - 1], 1))
        return 2 * torch.maximum(level * short, (level - 1) * short).mean()  # in the mean over levels the CRPS

    t.loss = loss


def sinkhorn(scores: Tensor, rounds: int = 20) -> Tensor:
    """A doubly stochastic matrix for each matrix of scores."""
    for _ in range(rounds):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp()


def relaxed_permutations(t: Training) -> None:
    """Gumbel-Sinkhorn (Mena et al., 2018): sorting is learned through permutations that are relaxed."""
    numbers = torch.rand(1024, 6)
    t.data = TensorDataset(numbers, numbers.sort(1).values)
    t.model = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 6))
    t.epochs, t.lr = 12, 1e-2

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, ordered = batch
        scores = model(x).repeat(2, 1, 1)  # two draws each; a row of scores says where a number goes
        uniform = torch.rand_like(scores).clamp(1e-6, 1 - 1e-6)
        places = sinkhorn((scores - 0.1 * (-uniform.log()).log()) / 0.5)
        found = torch.einsum("nij,ni->nj", places, x.repeat(2, 1))
        return F.mse_loss(found, ordered.repeat(2, 1))

    t.loss = loss


def relativistic(t: Training) -> None:
    """A relativistic average GAN (Jolicoeur-Martineau, 2019): is a true point truer than the mean false one?"""
    t.data = TensorDataset(points(t.seed, 2048), torch.zeros(2048))
    t.model, critic = (
        nn.Sequential(nn.Linear(into, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, out))
        for into, out in ((4, 2), (2, 1))
    )
    t.extra.append(critic)
    t.epochs, t.batch_size = 24, 128
    t.optimizers_of = lambda training: [
        Adam(each.parameters(), lr=lr, betas=(0.0, 0.99)) for each, lr in ((training.model, 1e-3), (critic, 1e-3))
    ]

    def duel(winner: Tensor, loser: Tensor) -> Tensor:
        return (F.softplus(loser.mean() - winner) + F.softplus(loser - winner.mean())).mean()

    def update(training: Training, batch: Batch) -> Tensor:
        to_make, to_judge = training.optimizers
        real = batch[0]
        made = training.model(torch.randn(len(real), 4))
        to_judge.zero_grad()
        duel(critic(real), critic(made.detach())).backward()
        to_judge.step()
        to_make.zero_grad()
        duel(critic(made), critic(real)).backward()
        to_make.step()
        return energy_distance(real, made.detach())

    t.update = update


def evidential(t: Training) -> None:
    """Deep evidential regression (Amini et al., 2020): a normal-inverse-gamma for each row, less sure where it errs."""
    t.model[4] = nn.Linear(64, 4)
    t.epochs, t.lr = 10, 2e-3

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mean, *rest = model(batch[0]).split(1, 1)
        nu, alpha, beta = (F.softplus(each) + 1e-3 for each in rest)
        alpha, error = alpha + 1, batch[1] - mean
        omega = 2 * beta * (1 + nu)
        likelihood = (
            0.5 * (math.pi / nu).log() - alpha * omega.log() + (alpha + 0.5) * (nu * error.square() + omega).log()
            + alpha.lgamma() - (alpha + 0.5).lgamma()
        )  # fmt: skip
        return (likelihood + 0.01 * error.abs() * (2 * nu + alpha)).mean()

    t.loss = loss


class Pondering(nn.Module):
    """A cell that goes round; after each round it answers, and says how likely it stops there."""

    def __init__(self, features: int, classes: int, rounds: int = 6) -> None:
        super().__init__()
        self.cell, self.rounds = nn.GRUCell(features, 48), rounds
        self.answer, self.stop = nn.Linear(48, classes), nn.Linear(48, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (rounds, n, classes), and the odds (rounds, n) of having stopped at each round, which add up to 1."""
        h, left, answers, shares = x.new_zeros(len(x), 48), x.new_ones(len(x)), [], []
        for number in range(self.rounds):
            h = self.cell(x, h)
            ends = self.stop(h).squeeze(1).sigmoid() if number < self.rounds - 1 else torch.ones_like(left)
            answers.append(self.answer(h))
            shares.append(left * ends)
            left = left * (1 - ends)
        return torch.stack(answers), torch.stack(shares)


def pondering(t: Training) -> None:
    """PonderNet (Banino et al., 2021): the loss in the mean over when it stops, which is kept near a geometric."""
    t.model, t.epochs = Pondering(20, 10), 6
    prior = 0.4 * 0.6 ** torch.arange(6.0)
    prior = (prior / prior.sum()).unsqueeze(1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        answers, shares = model(batch[0])
        each = F.cross_entropy(answers.flatten(0, 1), batch[1].repeat(len(answers)), reduction="none")
        surprise = (shares * ((shares + 1e-8) / prior).log()).sum(0)
        return ((shares * each.view_as(shares)).sum(0) + 0.01 * surprise).mean()

    t.loss = loss
