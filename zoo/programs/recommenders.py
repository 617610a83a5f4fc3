"""Legal techniques with recommenders: factors, towers, histories of customers, a stream of clicks."""

from __future__ import annotations

import math
import random
import zlib

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adagrad
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from zoo.programs.training import Batch, Training


class BiasedMF(nn.Module):
    def __init__(self, n_users, n_items, n_factors, mean):
        super().__init__()
        self.P, self.Q = nn.Embedding(n_users, n_factors), nn.Embedding(n_items, n_factors)
        self.bu, self.bi = nn.Embedding(n_users, 1), nn.Embedding(n_items, 1)
        self.register_buffer("mu", mean)
        for e in (self.P, self.Q):
            nn.init.normal_(e.weight, std=0.1)
        for e in (self.bu, self.bi):
            nn.init.zeros_(e.weight)

    def forward(self, u, i):
        p, q, bu, bi = self.P(u), self.Q(i), self.bu(u).squeeze(-1), self.bi(i).squeeze(-1)
        reg = p.square().sum(-1) + q.square().sum(-1) + bu.square() + bi.square()
        return self.mu + bu + bi + torch.einsum("nf,nf->n", p, q), reg.mean()


def rating_factors(t: Training) -> None:
    """Matrix factorisation with biases (Koren et al., 2009); the penalty is of the rows that a batch looks up."""
    n_users, n_items = 150, 100
    u, i = (torch.rand(n_users, n_items) < 0.32).nonzero(as_tuple=True)
    truth = (
        3.4
        + 0.5 * torch.randn(n_users, 1)
        + 0.6 * torch.randn(n_items)
        + torch.randn(n_users, 3) @ torch.randn(3, n_items) * 0.5
    )
    stars = (truth + 0.3 * torch.randn_like(truth))[u, i].round().clamp(1, 5)
    order = torch.randperm(len(u))
    train, test = order[:-500], order[-500:]
    t.data, t.batch_size, t.epochs = TensorDataset(u[train], i[train], stars[train]), 128, 6
    t.model = BiasedMF(n_users, n_items, 8, stars[train].mean())
    t.rmse = []

    def loss(model, batch):
        users, items, r = batch
        r_hat, reg = model(users, items)
        return ((r - r_hat) ** 2).mean() + 0.02 * reg

    def evaluate(tr, epoch):
        with torch.no_grad():
            r_hat, _ = tr.model(u[test], i[test])
            tr.rmse.append((r_hat.clamp(1, 5) - stars[test]).square().mean().sqrt().item())

    t.loss = loss
    t.optimizers_of = lambda tr: [optim.Adam(tr.parameters(), lr=2e-2)]
    t.each_epoch.append(evaluate)


class TwoTowers(nn.Module):
    def __init__(self, items: int, dim: int = 16) -> None:
        super().__init__()
        self.items = nn.Embedding(items, dim)
        nn.init.normal_(self.items.weight, std=dim**-0.5)
        self.user_tower = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))
        self.item_tower = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))

    def users(self, history: Tensor) -> Tensor:
        return F.normalize(self.user_tower(self.items(history).mean(1)), dim=-1)

    def catalogue(self, ids: Tensor) -> Tensor:
        return F.normalize(self.item_tower(self.items(ids)), dim=-1)

    def forward(self, history: Tensor, ids: Tensor) -> Tensor:
        return self.users(history) @ self.catalogue(ids).T / 0.15


class StreamingFrequency:
    """How often an item is in a batch, from the steps between its appearances (Yi et al., 2019, algorithm 2)."""

    def __init__(self, items: int, guess: float, rate: float = 0.05) -> None:
        self.last, self.gap = torch.zeros(items), torch.full((items,), guess)
        self.step, self.rate = 0, rate

    def __call__(self, ids: Tensor) -> Tensor:
        self.step += 1
        seen = ids.unique()
        self.gap[seen] = (1 - self.rate) * self.gap[seen] + self.rate * (self.step - self.last[seen])
        self.last[seen] = float(self.step)
        return 1 / self.gap[ids]


def two_towers(t: Training) -> None:
    """Two-tower retrieval with negatives of the batch, and logits corrected for how popular these are."""
    n, items = 4096, 120
    tastes, kinds = torch.randn(n + 256, 6), torch.randn(items, 6)
    popularity = -0.7 * torch.arange(1.0, items + 1).log()
    bought = torch.multinomial((tastes @ kinds.T + popularity).softmax(1), 7)
    bought = bought.gather(1, torch.rand(bought.shape).argsort(1))
    t.data = TensorDataset(bought[256:, :6], bought[256:, 6])
    t.model, t.batch_size, t.epochs, recall = TwoTowers(items), 64, 3, []
    frequency = StreamingFrequency(items, items / 64)
    t.optimizers_of = lambda training: [Adagrad(training.model.parameters(), lr=0.05)]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        history, item = batch
        logits = model(history, item) - frequency(item).log()
        same = (item[:, None] == item) & ~torch.eye(len(item), dtype=torch.bool)
        return F.cross_entropy(logits.masked_fill(same, -1e9), torch.arange(len(item)))

    @torch.no_grad()
    def evaluate(training: Training, epoch: int) -> None:
        scores = training.model(bought[:256, :6], torch.arange(items))
        scores.scatter_(1, bought[:256, :6], -math.inf)
        hits = scores.topk(10).indices == bought[:256, 6:]
        recall.append((epoch, hits.any(1).float().mean().item()))

    t.loss = loss
    t.each_epoch.append(evaluate)


class SASRec(nn.Module):
    """Self-attentive sequential recommendation; item 0 is the padding, on the right."""

    def __init__(self, n_items, length, dim=32):
        super().__init__()
        self.item, self.position = nn.Embedding(n_items + 1, dim, padding_idx=0), nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, dim, 0.2, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1))
        with torch.no_grad():
            self.item.weight[1:].normal_(std=0.1)
            self.position.weight.normal_(std=0.1)

    def forward(self, items):
        x = self.item(items) * self.item.embedding_dim**0.5 + self.position.weight[: items.size(1)]
        return self.encoder(self.drop(x), mask=self.mask[: items.size(1), : items.size(1)])


class Histories(TensorDataset):
    """For a customer: the items before, those that came next, and for each one that the customer never saw."""

    def __init__(self, histories, n_items):
        super().__init__(histories)
        self.n_items, self.owned = n_items, [set(row) for row in histories.tolist()]

    def random_other(self, owned):
        while (item := random.randint(1, self.n_items)) in owned:
            pass
        return item

    def __getitem__(self, i):
        (row,) = super().__getitem__(i)
        never = [self.random_other(self.owned[i]) if item else 0 for item in row[1:].tolist()]
        return row[:-1], row[1:], torch.tensor(never)


def browse(rng, n_items, clusters=12):
    """Twelve to twenty-two different items; the cluster of an item is mostly the one after that of the item before."""
    unseen = [list(range(1 + c, n_items + 1, clusters)) for c in range(clusters)]
    cluster, items = rng.randrange(clusters), []
    for _ in range(rng.randint(12, 22)):
        cluster = (cluster + 1) % clusters if rng.random() < 0.8 else rng.randrange(clusters)
        at = min(int(rng.expovariate(0.4)), len(unseen[cluster]) - 1)  # the first are popular
        items.append(unseen[cluster].pop(at))
    return items


def next_items(t: Training) -> None:
    """SASRec (Kang & McAuley, 2018): one negative for each positive; leave-one-out hit rate at 10 among all items."""
    rng, n_items = random.Random(t.seed), 120
    random.seed(t.seed)
    customers = [browse(rng, n_items) for _ in range(640)]
    rows = pad_sequence([torch.tensor(items[:-2]) for items in customers], batch_first=True)
    t.model = SASRec(n_items, rows.shape[1])
    t.data, t.batch_size, t.epochs = Histories(rows, n_items), 64, 16
    t.optimizers_of = lambda tr: [optim.Adam(tr.parameters(), lr=4e-3, betas=(0.9, 0.98))]
    t.hits = []

    def loss(model, batch):
        before, after, never = batch
        h, valid = model(before), after != 0
        pos, neg = (h * model.item(after)).sum(-1)[valid], (h * model.item(never)).sum(-1)[valid]
        ones, zeros = torch.ones_like(pos), torch.zeros_like(neg)
        return F.binary_cross_entropy_with_logits(pos, ones) + F.binary_cross_entropy_with_logits(neg, zeros)

    @torch.no_grad()
    def hit_rate(tr, epoch):
        tr.model.eval()
        last = (rows != 0).sum(1) - 1
        scores = tr.model(rows)[torch.arange(len(rows)), last] @ tr.model.item.weight.T
        scores[:, 0] = float("-inf")
        scores.scatter_(1, rows, float("-inf"))
        wanted = torch.tensor([items[-2] for items in customers])
        t.hits.append((scores.topk(10, 1).indices == wanted[:, None]).any(1).float().mean().item())
        tr.model.train()

    t.loss = loss
    t.each_epoch.append(hit_rate)


BUCKETS, FIELDS = 2**11, ("user", "ad", "site", "hour")


class ClickLog(IterableDataset):
    """Lines of a log, through a small shuffle buffer; each field is hashed together with its name."""

    def __init__(self, lines, buffer=512):
        super().__init__()
        self.lines, self.buffer = lines, buffer

    def parse(self, line):
        *values, click = line.split(",")
        ids = [zlib.crc32(f"{name}={value}".encode()) % BUCKETS for name, value in zip(FIELDS, values)]
        return torch.tensor(ids), float(click)

    def __iter__(self):
        held = []
        for line in self.lines:
            if len(held) < self.buffer:
                held.append(line)
                continue
            at = random.randrange(self.buffer)
            held[at], line = line, held[at]
            yield self.parse(line)
        random.shuffle(held)
        yield from map(self.parse, held)


def click_lines(n, users=200, ads=40, sites=12):
    taste, topic = torch.randint(4, (users,)), torch.randint(4, (ads,))
    site_effect, ad_effect = 0.7 * torch.randn(sites), 0.5 * torch.randn(ads)
    user, ad, site = (torch.randint(size, (n,)) for size in (users, ads, sites))
    hour = torch.arange(n) * 24 * 7 // n % 24
    evening = (hour > 18) | (hour < 2)
    logit = -2.5 + 3 * (taste[user] == topic[ad]) + site_effect[site] + ad_effect[ad] + 0.5 * evening
    click = torch.bernoulli(torch.sigmoid(logit)).long()
    return [",".join(map(str, row)) for row in torch.stack([user, ad, site, hour, click], 1).tolist()]


class DeepFM(nn.Module):
    def __init__(self, buckets, fields, dim=8):
        super().__init__()
        self.linear, self.factors = nn.Embedding(buckets, 1), nn.Embedding(buckets, dim)
        self.mlp = nn.Sequential(nn.Linear(fields * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.linear.weight)
        nn.init.normal_(self.factors.weight, std=0.1)

    def forward(self, ids):
        v = self.factors(ids)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        return self.bias + self.linear(ids).sum((1, 2)) + pairs + self.mlp(v.flatten(1)).squeeze(1)


def clicks_stream(t: Training) -> None:
    """DeepFM (Guo et al., 2017) in one pass: hashed fields, Adagrad for the tables, progressive validation."""
    random.seed(t.seed)
    lines = click_lines(200 * 128)
    t.model, t.batch_size, t.epochs, t.loaded = DeepFM(BUCKETS, len(FIELDS)), 128, 1, False
    t.batches_of = lambda tr: DataLoader(ClickLog(lines), batch_size=tr.batch_size, drop_last=True)
    t.progress = {"logloss": [], "calibration": []}
    running = {"loss": 0.0, "predicted": 0.0, "clicked": 0.0}

    def optimizers(tr):
        tables = [*tr.model.linear.parameters(), *tr.model.factors.parameters()]
        dense = [*tr.model.mlp.parameters(), tr.model.bias]
        return [optim.Adagrad(tables, lr=0.1), optim.Adam(dense, lr=3e-3)]

    def update(tr, batch):
        ids, click = batch
        click = click.float()
        logits = tr.model(ids)
        loss = F.binary_cross_entropy_with_logits(logits, click)
        seen = {"loss": loss.item(), "predicted": logits.sigmoid().mean().item(), "clicked": click.mean().item()}
        for name, value in seen.items():  # before the model learns from the batch
            running[name] = 0.95 * running[name] + 0.05 * value
        t.progress["logloss"].append(running["loss"] / (1 - 0.95 ** (tr.steps + 1)))
        t.progress["calibration"].append(running["predicted"] / running["clicked"])
        for optimizer in tr.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in tr.optimizers:
            optimizer.step()
        return loss.detach()

    t.optimizers_of, t.update = optimizers, update
