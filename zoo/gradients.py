"""Zoo, group G: faults in the handling of gradients, in plain PyTorch loops."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from zoo.host import Watch, fault, host, loader, mlp, table
from zoo.model import train


class LastState(nn.Module):
    """Regression from the last state of an RNN; its recurrent weights are orthogonal times 2, so gradients explode."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(4, width, batch_first=True), nn.Linear(width, 1)
        nn.init.orthogonal_(self.rnn.weight_hh_l0, gain=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1]).squeeze(1)


@fault("G01", "gradient.exploding", delay="D")
def recurrence_explodes(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = LastState()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    x = torch.randn(640, 64, 4)
    data = loader(x, 8 * x[:, :, 0].mean(1), seed, batch=32)
    with watch(model, optimizer, loader=data):
        for _ in range(2):
            for _, series, target in data:
                optimizer.zero_grad()
                F.mse_loss(model(series), target).backward()
                optimizer.step()


@fault("G02", "gradient.clip_before_unscale", delay="S", fixable=False)
def clip_scaled_gradients(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    data = loader(*table(seed), seed)
    with watch(model, optimizer, loader=data, scaler=scaler):
        for _ in range(3):
            for _, x, y in data:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


@fault("G03", "gradient.clip_no_effect", delay="S", fixable=False)
def clip_after_step(watch: Watch, seed: int) -> None:
    model, optimizer, data = host(seed, torch.optim.SGD, lr=0.1, momentum=0.9)
    with watch(model, optimizer, loader=data):
        for _ in range(3):
            for _, x, y in data:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                clip_grad_norm_(model.parameters(), 0.1)
                optimizer.zero_grad()


@fault("G04", "gradient.clip_no_effect", delay="S", fixable=False)
def clip_exhausted_iterator(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp()
    parameters = filter(lambda p: p.requires_grad, model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    data = loader(*table(seed), seed)
    with watch(model, optimizer, loader=data):
        for _ in range(3):
            for _, x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                clip_grad_norm_(parameters, 0.1)
                optimizer.step()


@fault("G05", "gradient.clip_always_active", delay="B")
def clip_to_nothing(watch: Watch, seed: int) -> None:
    model, optimizer, data = host(seed, torch.optim.SGD, lr=0.1)
    with watch(model, optimizer, loader=data):
        for _ in range(4):
            for _, x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                clip_grad_norm_(model.parameters(), 1e-4)
                optimizer.step()


class Tagged(nn.Module):
    """A classifier that adds a learned offset to samples of a second source: those with 1 as their last feature."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.source = mlp(), nn.Linear(1, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, :-1]) + self.source(x[:, -1:])


@fault("G06", "gradient.clip_spreads_nan", delay="N", active=8, fixable=False)
def one_nan_gradient(watch: Watch, seed: int) -> Mapping[str, Any]:
    """The loop divides a gradient by its norm. Batch 8 has no sample of the second source: 0 / 0."""
    torch.manual_seed(seed)
    x, y = table(seed)
    x = torch.cat([x, (torch.rand(len(x), 1) < 0.2).float()], 1)
    x[next(islice(loader(x, y, seed), 7, None))[0], -1] = 0.0
    model = Tagged()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = loader(x, y, seed)
    with watch(model, optimizer, loader=data):
        for _ in range(2):
            for _, batch, target in data:
                optimizer.zero_grad()
                F.cross_entropy(model(batch), target).backward()
                model.source.weight.grad /= model.source.weight.grad.norm()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    return {"module": "source", "dtype": "float32"}


class Cut(nn.Module):
    """Detaches the output of ``body``, which so never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.neck, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).detach()
        return self.head(self.neck(h).relu())


@fault("G07", "gradient.graph_cut", delay="S")
def detached_body(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    train(watch, Cut(), loader(*table(seed), seed))
