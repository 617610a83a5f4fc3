"""Loops, stages and gradients by hand for the end: nobody may look at them while laws are written."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from zoo.host import table
from zoo.programs.training import Batch, Training


def finite_steps(t: Training) -> None:
    """Everyday practice (Ott et al., 2019): batches with a missing reading are passed over, as are infinite steps."""
    x, y = t.data.tensors
    x = x.clone()
    x[torch.randperm(len(x))[:6], 3] = torch.nan
    t.data, t.epochs = TensorDataset(x, y), 8

    def loop(training: Training) -> Iterator[Tensor]:
        (optimizer,) = training.optimizers
        for batch in (each for _ in range(training.epochs) for each in training.batches):
            if not all(part.isfinite().all() for part in batch):
                continue
            optimizer.zero_grad()
            loss = training.loss(training.model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(training.parameters(), 5.0)
            if norm.isfinite():
                optimizer.step()
                yield loss.detach()

    t.loop = loop


def layer_after_layer(t: Training) -> None:
    """Greedy layer-wise pretraining (Bengio et al., 2007): each layer rebuilds its input, then all learn labels."""
    sizes = [64, 48, 32, 16]
    layers = [nn.Sequential(nn.Linear(into, out), nn.Sigmoid()) for into, out in pairwise(sizes)]
    back = nn.ModuleList(nn.Linear(out, into) for into, out in pairwise(sizes))
    t.model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(16, 4))
    t.extra.append(back)
    t.optimizers_of = lambda training: [
        *(Adam([*layer.parameters(), *up.parameters()], lr=5e-3) for layer, up in zip(layers, back)),
        Adam(training.model.parameters(), lr=3e-3),
    ]

    def stages(training: Training) -> Iterator[Tensor]:
        *early, last = training.optimizers
        for number, optimizer in enumerate(early):
            for x, _ in (batch for _ in range(8) for batch in training.batches):
                with torch.no_grad():
                    below = training.model[: number + 1](x)
                optimizer.zero_grad()
                loss = F.mse_loss(back[number](layers[number](below)), below)
                loss.backward()
                optimizer.step()
                yield loss.detach()
        for batch in (batch for _ in range(8) for batch in training.batches):
            last.zero_grad()
            loss = training.loss(training.model, batch)
            loss.backward()
            last.step()
            yield loss.detach()

    t.loop = stages


def _asked(n: int) -> Batch:
    """Queries with 12 documents each (n, 12, 10), and how much each is to the point (n, 12), from 0 to 4."""
    x = torch.randn(n, 12, 10)
    worth = x[..., 0] + x[..., 1] * x[..., 2] + x[..., 3].abs() + 0.3 * torch.randn(n, 12)
    return x, torch.bucketize(worth, torch.tensor([-0.5, 0.7, 1.6, 2.6])).float()


def ranked(t: Training) -> None:
    """LambdaRank (Burges et al., 2006): no loss, but the force on each score, by what a swap would do to the NDCG."""
    t.data = TensorDataset(*_asked(768))
    t.model, t.epochs = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)), 8

    def update(training: Training, batch: Batch) -> Tensor:
        (optimizer,), (x, y) = training.optimizers, batch
        scores = training.model(x).squeeze(2)
        with torch.no_grad():
            gain, discount = 2**y - 1, 1 / torch.arange(2.0, 14.0).log2()
            best = (gain.sort(1, descending=True).values @ discount).clamp(min=1e-6)
            here = discount[scores.argsort(1, descending=True).argsort(1)]
            swap = (gain.unsqueeze(2) - gain.unsqueeze(1)) * (here.unsqueeze(2) - here.unsqueeze(1))
            wrong = (scores.unsqueeze(1) - scores.unsqueeze(2)).sigmoid() * (y.unsqueeze(2) > y.unsqueeze(1))
            force = wrong * swap.abs() / best[:, None, None]  # (queries, better, worse)
            slope = (force.sum(1) - force.sum(2)) / len(x)
        optimizer.zero_grad()
        scores.backward(slope)
        optimizer.step()
        return 1 - ((gain * here).sum(1) / best).mean()

    t.update = update


def ranked_lists(t: Training) -> None:
    """ListNet (Cao et al., 2007): how likely each document is the first, by the scores as by what is to the point."""
    t.data = TensorDataset(*_asked(768))
    t.model, t.epochs = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)), 8
    t.loss = lambda model, batch: F.cross_entropy(model(batch[0]).squeeze(2), batch[1].softmax(1))


def labelled_contrast(t: Training) -> None:
    """Supervised contrast (Khosla et al., 2020): views of one class attract; then a linear layer on what is frozen."""
    encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    encoder.extend([nn.MaxPool2d(2), nn.Flatten()])
    t.model = nn.Sequential(encoder, nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 16))
    head = nn.Linear(256, 4)
    t.extra.append(head)
    t.epochs = 10
    t.optimizers_of = lambda training: [
        SGD(training.model.parameters(), lr=0.05, momentum=0.9), Adam(head.parameters(), lr=3e-3)
    ]  # fmt: skip

    def begin(training: Training, epoch: int) -> None:
        if epoch >= 6:
            training.model.eval().requires_grad_(False)

    def update(training: Training, batch: Batch) -> Tensor:
        (first, second), (x, y) = training.optimizers, batch
        if not encoder.training:
            second.zero_grad()
            loss = F.cross_entropy(head(encoder(x)), y)
            loss.backward()
            second.step()
            return loss.detach()
        x, y = torch.cat([x, x]), torch.cat([y, y])
        moved = torch.roll(x, tuple(torch.randint(-1, 2, (2,)).tolist()), (2, 3)) + 0.3 * torch.randn_like(x)
        found, itself = F.normalize(training.model(moved), dim=1), torch.eye(len(x), dtype=torch.bool)
        log_odds = (found @ found.T / 0.1).masked_fill(itself, -torch.inf).log_softmax(1)
        alike = (y.unsqueeze(1) == y) & ~itself
        loss = -(log_odds.masked_fill(~alike, 0.0).sum(1) / alike.sum(1)).mean()
        first.zero_grad()
        loss.backward()
        first.step()
        return loss.detach()

    t.each_epoch.append(begin)
    t.update = update


class OldAndNew(nn.Module):
    """What an old task has learned, with a second answer for a new one."""

    def __init__(self, body: nn.Sequential) -> None:
        super().__init__()
        self.body, self.old, self.new = body[:-1], body[-1], nn.Linear(body[-1].in_features, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.old(x), self.new(x)


def not_forgotten(t: Training) -> None:
    """Learning without forgetting (Li and Hoiem, 2016): on rows of a new task the old head answers as it did."""
    x, y = t.data.tensors
    first = Adam(t.model.parameters(), lr=3e-3)
    for rows in [each for _ in range(8) for each in torch.randperm(len(x)).split(32)]:  # the old task
        first.zero_grad()
        F.cross_entropy(t.model(x[rows]), y[rows]).backward()
        first.step()
    x, y = table(t.seed + 1000, 1024)
    with torch.no_grad():
        before = t.model(x).div(2).softmax(1)
    t.data, t.model, t.epochs = TensorDataset(x, y, before), OldAndNew(t.model), 10
    t.optimizers_of = lambda training: [SGD(training.model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)]

    def warm_up(training: Training, epoch: int) -> None:
        for part in (training.model.body, training.model.old):
            part.requires_grad_(epoch >= 2)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, y, before = batch
        old, new = model(x)
        return F.cross_entropy(new, y) + F.cross_entropy(old / 2, before)

    t.each_epoch.append(warm_up)
    t.loss = loss
