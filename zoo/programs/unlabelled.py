"""Legal learning without labels, or with a few: local rules, decorrelated views, clusters, labels that spread."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from zoo.programs.training import Batch, Training


def hebbian(t: Training) -> None:
    """The generalised Hebbian algorithm (Sanger, 1989): a local rule, without a loss, finds principal components."""
    t.model, t.epochs = nn.Linear(8, 3, bias=False), 16
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1)]
    t.scheduler_of = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step / 200))

    @torch.no_grad()
    def update(training: Training, batch: Batch) -> Tensor:
        x, weight = batch[0], training.model.weight
        out = training.model(x)
        rebuilt = out @ weight
        weight.grad = ((out.T @ out).tril() @ weight - out.T @ x) / len(x)
        training.optimizers[0].step()
        return F.mse_loss(rebuilt, x)

    t.update = update


def decorrelated(t: Training) -> None:
    """Barlow Twins (Zbontar et al., 2021): two views agree feature by feature, and features tell different things."""
    t.model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32, bias=False)
    )
    t.batch_size, t.epochs = 128, 40

    def view(x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.3) + 0.1 * torch.randn_like(x)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        one, two = (F.batch_norm(model(view(batch[0])), None, None, training=True) for _ in range(2))
        correlation = one.T @ two / len(one)
        same = correlation.diagonal()
        return (same - 1).square().sum() + 0.01 * (correlation.square().sum() - same.square().sum())

    t.loss = loss


class ClusterNet(nn.Module):
    """An autoencoder with centres among its codes; ``forward`` gives each row's share in each (n, centres)."""

    def __init__(self, features: int, centres: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 5))
        self.decoder = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, features))
        self.centres = nn.Parameter(torch.zeros(centres, 5))

    def forward(self, x: Tensor) -> Tensor:
        near = 1 / (1 + (self.encoder(x).unsqueeze(1) - self.centres).square().sum(2))
        return near / near.sum(1, keepdim=True)

    @torch.no_grad()
    def place_centres(self, x: Tensor) -> None:
        """The best of 20 runs of k-means."""
        codes, best = self.encoder(x), math.inf
        for _ in range(20):
            centres = codes[torch.randperm(len(codes))[: len(self.centres)]]
            for _ in range(10):
                member = F.one_hot(torch.cdist(codes, centres).argmin(1), len(centres)).float()
                centres = member.T @ codes / member.sum(0).clamp(min=1).unsqueeze(1)
            spread = float(torch.cdist(codes, centres).amin(1).square().mean())
            if spread < best:
                best = spread
                self.centres.copy_(centres)


def embedded_clusters(t: Training) -> None:
    """Deep embedded clustering (Xie et al., 2016): after an autoencoder, targets are the clusters' own surer shares."""
    x = t.data.tensors[0]
    t.data = TensorDataset(x, torch.arange(len(x)))
    t.model, t.epochs, targets = ClusterNet(64, 4), 24, torch.zeros(len(x), 4)
    alone = 12  # epochs of the autoencoder by itself

    @torch.no_grad()
    def sharpen(training: Training, epoch: int) -> None:
        if epoch < alone:
            return
        if epoch == alone:
            training.model.place_centres(x)
        shares = training.model(x)
        surer = shares.square() / shares.sum(0)
        targets.copy_(surer / surer.sum(1, keepdim=True))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if not targets.any():
            return F.mse_loss(model.decoder(model.encoder(batch[0])), batch[0].flatten(1))
        return F.kl_div(model(batch[0]).log(), targets[batch[1]], reduction="batchmean")

    t.each_epoch.append(sharpen)
    t.loss = loss


def diffused(seen: Tensor, labels: Tensor) -> Tensor:
    """What labels (n, classes) of some rows come to where they spread over a graph of near rows (n, features)."""
    near, rows = (seen @ seen.T).fill_diagonal_(0).topk(20, 1)
    graph = torch.zeros(len(seen), len(seen)).scatter_(1, rows, near.clamp(min=0) ** 3)
    graph = graph + graph.T
    scale = graph.sum(1, keepdim=True).clamp(min=1e-6).rsqrt()
    return torch.linalg.solve(torch.eye(len(seen)) - 0.99 * scale * graph * scale.T, labels).clamp(min=1e-9)


def propagated_labels(t: Training) -> None:
    """Label propagation (Iscen et al., 2019): each epoch the few known labels spread by what the network sees."""
    x, y = t.data.tensors
    known = torch.cat([(y == label).nonzero().flatten()[:3] for label in range(4)])
    few = torch.zeros(len(y), 4).index_put((known, y[known]), torch.tensor(1.0))
    t.data, t.epochs = TensorDataset(x, torch.arange(len(x))), 20
    guessed, weights = torch.zeros_like(y), torch.zeros(len(y))

    @torch.no_grad()
    def spread(training: Training, epoch: int) -> None:
        if epoch < 4:
            return
        training.model.eval()
        seen = F.normalize(training.model[:-1](x), dim=1)
        training.model.train()
        shares = F.normalize(diffused(seen, few), p=1, dim=1)
        guessed.copy_(shares.argmax(1))
        rarity = 1 / torch.bincount(guessed, minlength=4).clamp(min=1)
        sure = 1 + (shares * shares.log()).sum(1) / math.log(4)
        weights.copy_(sure * rarity[guessed] / rarity[guessed].mean())

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out, on_known = model(torch.cat([batch[0], x[known]])).split([len(batch[0]), len(known)])
        each = F.cross_entropy(out, guessed[batch[1]], reduction="none")
        return F.cross_entropy(on_known, y[known]) + (weights[batch[1]] * each).mean()

    t.each_epoch.append(spread)
    t.loss = loss
