"""Legal training by what is alike: two answers, what is near a proxy, tastes and kinds, views of one class."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer, SparseAdam
from torch.utils.data import TensorDataset

from zoo.host import images
from zoo.programs.training import Batch, Training


def two_dropouts(t: Training) -> None:
    """R-Drop (Liang et al., 2021): two passes with other dropouts shall agree, by the divergence in both directions."""
    t.model.norm = nn.Sequential(nn.LayerNorm(24), nn.Dropout(0.3))
    t.epochs = 8

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        logits = model(torch.cat([x, x]))
        one, other = logits.log_softmax(1).chunk(2)
        apart = F.kl_div(one, other, log_target=True, reduction="batchmean")
        apart = apart + F.kl_div(other, one, log_target=True, reduction="batchmean")
        return F.cross_entropy(logits, torch.cat([y, y])) + 0.5 * apart

    t.loss = loss


def proxies(t: Training) -> None:
    """Proxy-NCA (Movshovitz-Attias et al., 2017): near the proxy of its class, far from the proxies of the others."""
    x, y = images(t.seed, 960, classes=12)
    t.data = TensorDataset(x[y < 8], y[y < 8])  # the others are never seen
    t.model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 16)
    )
    t.extra.append(nn.ParameterList([nn.Parameter(torch.randn(8, 16))]))
    t.epochs = 8
    t.optimizers_of = lambda training: [
        Adam([{"params": training.model.parameters()}, {"params": training.extra[0].parameters(), "lr": 3e-2}], lr=1e-3)
    ]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rows, near = 3 * F.normalize(model(batch[0]), dim=1), 3 * F.normalize(t.extra[0][0], dim=1)
        apart = (rows.unsqueeze(1) - near).square().sum(2)
        own = F.one_hot(batch[1], 8).bool()
        return (apart[own] + (-apart).masked_fill(own, -torch.inf).logsumexp(1)).mean()

    t.loss = loss


class Ratings(nn.Module):
    """What a user gives a thing: by the product of two vectors, and by a network on both; gradients of rows alone."""

    def __init__(self, users: int, things: int, d: int = 8) -> None:
        super().__init__()
        self.users, self.things = nn.Embedding(users, d, sparse=True), nn.Embedding(things, d, sparse=True)
        for table in (self.users, self.things):
            nn.init.normal_(table.weight, std=0.3)
        self.deep = nn.Sequential(nn.Linear(2 * d, 16), nn.ReLU(), nn.Linear(16, d), nn.ReLU())
        self.out = nn.Linear(2 * d, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        user, thing = self.users(pairs[:, 0]), self.things(pairs[:, 1])
        return self.out(torch.cat([user * thing, self.deep(torch.cat([user, thing], 1))], 1))


def sparse_rows(t: Training) -> None:
    """Neural matrix factorisation (He et al., 2017): sparse embeddings with a lazy Adam, the rest with another."""
    pairs = torch.cartesian_prod(torch.arange(60), torch.arange(40))[torch.randperm(2400)]
    tastes, kinds = torch.randn(60, 3), torch.randn(40, 3)
    ratings = (tastes[pairs[:, 0]] * kinds[pairs[:, 1]]).sum(1, keepdim=True) + 0.2 * torch.randn(2400, 1)
    t.data, t.model, t.epochs = TensorDataset(pairs[:2000], ratings[:2000]), Ratings(60, 40), 12

    def both(training: Training) -> list[Optimizer]:
        model = training.model
        dense = [*model.deep.parameters(), *model.out.parameters()]
        return [SparseAdam([model.users.weight, model.things.weight], lr=1e-2), Adam(dense, lr=3e-3)]

    def update(training: Training, batch: Batch) -> Tensor:
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        for optimizer in training.optimizers:
            optimizer.step()
        return loss.detach()

    t.optimizers_of, t.update = both, update


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
