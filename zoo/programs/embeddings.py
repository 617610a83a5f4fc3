"""Legal training of embeddings: margins between directions, prototypes of few examples, words by their neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Sampler, TensorDataset

from zoo.host import images
from zoo.programs.training import Batch, Training


class CosineHead(nn.Module):
    """The cosine between a row and the direction of each class."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, features))
        nn.init.xavier_normal_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1))


def angular_margin(t: Training) -> None:
    """ArcFace (Deng et al., 2019): the angle to the own class counts as if it were larger by a margin."""
    scale, margin = 16.0, 0.4
    t.model[6], t.model[8] = nn.AdaptiveAvgPool2d(2), nn.Sequential(
        nn.Linear(32, 16, bias=False), nn.BatchNorm1d(16), CosineHead(16, 4)
    )  # fmt: skip
    t.epochs = 8

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        cosine = model(batch[0])
        sine = (1 - cosine.square()).clamp(min=1e-6).sqrt()
        moved = cosine * math.cos(margin) - sine * math.sin(margin)
        moved = torch.where(cosine > -math.cos(margin), moved, cosine - margin * math.sin(margin))
        own = F.one_hot(batch[1], cosine.shape[1]).bool()
        return F.cross_entropy(scale * torch.where(own, moved, cosine), batch[1])

    t.loss = loss


class ShotSampler(Sampler[list[int]]):
    """Rows of episodes: some classes, and of each some examples, class after class."""

    def __init__(self, labels: Tensor, ways: int, shots: int, episodes: int) -> None:
        self.members = [(labels == label).nonzero().flatten() for label in labels.unique()]
        self.ways, self.shots, self.episodes = ways, shots, episodes

    def __len__(self) -> int:
        return self.episodes

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.episodes):
            chosen = [self.members[number] for number in torch.randperm(len(self.members))[: self.ways].tolist()]
            yield torch.cat([rows[torch.randperm(len(rows))[: self.shots]] for rows in chosen]).tolist()


def prototypes(t: Training) -> None:
    """Prototypical networks (Snell et al., 2017): a class is the mean of five examples; new classes in each episode."""
    x, y = images(t.seed, 3000, classes=120)
    shifts = torch.randint(3, (len(x), 2)).tolist()
    x = torch.stack([image.roll((down, right), (1, 2)) for image, (down, right) in zip(x, shifts)])
    seen = y < 100  # the others are for who measures
    t.data, t.epochs, t.loaded = TensorDataset(x[seen], y[seen]), 10, False
    t.model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    t.batches_of = lambda training: DataLoader(training.data, batch_sampler=ShotSampler(y[seen], 8, 10, 40))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        places = model(batch[0]).unflatten(0, (8, 10))
        support, queries = places[:, :5].mean(1), places[:, 5:].flatten(0, 1)
        distances = (queries.unsqueeze(1) - support).square().sum(2)
        return F.cross_entropy(-distances, torch.arange(8).repeat_interleave(5))

    t.loss = loss


class SkipGram(nn.Module):
    """Two vectors for each word, one where it stands in the middle, and one where it is a neighbour."""

    def __init__(self, words: int, features: int = 16) -> None:
        super().__init__()
        self.middle, self.near = (nn.Embedding(words, features, sparse=True) for _ in range(2))
        nn.init.uniform_(self.middle.weight, -0.5 / features, 0.5 / features)
        nn.init.zeros_(self.near.weight)

    def forward(self, middle: Tensor, near: Tensor) -> Tensor:
        """Scores of ``near`` (n, k) beside ``middle`` (n,)."""
        return (self.near(near) @ self.middle(middle).unsqueeze(2)).squeeze(2)


def skip_grams(t: Training) -> None:
    """word2vec (Mikolov et al., 2013): neighbours against five words that are drawn by their frequency ** 0.75."""
    t.model, t.epochs, t.batch_size = SkipGram(33), 16, 16
    ids = t.data.tensors[0]
    odds = torch.bincount(ids.flatten(), minlength=33).float() ** 0.75
    steps = t.epochs * (len(t.data) // t.batch_size)
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.025)]
    t.scheduler_of = lambda optimizer: LambdaLR(optimizer, lambda step: max(1 - step / steps, 1e-4))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        window = 1 + int(torch.randint(2, ()))  # the nearer one is drawn more often
        pairs = [(batch[0][:, gap:], batch[0][:, :-gap]) for gap in range(1, window + 1)]
        one, other = (torch.cat([part.flatten() for part in side]) for side in zip(*pairs))
        middle, near = torch.cat([one, other]), torch.cat([other, one])
        drawn = torch.multinomial(odds, 5 * len(middle), replacement=True).view(-1, 5)
        scores = model(middle, torch.cat([near.unsqueeze(1), drawn], 1))
        each = F.softplus(-scores[:, 0]) + F.softplus(scores[:, 1:]).sum(1)
        return each.sum()  # as if pair after pair had come

    t.loss = loss
