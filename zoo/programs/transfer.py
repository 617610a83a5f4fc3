"""Legal training that goes on from what was learned before: layer after layer, a new task without loss of the old."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

from zoo.host import table
from zoo.programs.training import Training


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
