"""What healthy programs are made of: a small task, and a loop that a technique may change at any of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from zoo.host import TinyGPT, cnn, images, mlp, sequences, table
from zoo.hosts.report import Watch
from zoo.hosts.worlds import points

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass
class Training:
    """A task and its loop. ``loss`` takes the model and a batch; ``update`` makes one step and returns the loss.

    ``each_step`` and ``each_epoch`` are called after a step and before an epoch. ``extra`` are modules that are
    trained beside the model. ``loop`` takes the place of the loop and yields the loss of each step; ``loaded`` is false
    where no loader brings the samples.
    """

    base: str
    model: nn.Module
    data: TensorDataset
    loss: Loss
    seed: int
    batch_size: int = 32
    epochs: int = 4
    lr: float = 3e-3
    accumulation: int = 1
    shuffle: bool = True
    extra: list[nn.Module] = field(default_factory=list)
    transform: Callable[[Batch], Batch] | None = None
    optimizers_of: Callable[[Training], list[Optimizer]] | None = None
    scheduler_of: Callable[[Optimizer], LRScheduler] | None = None
    scaler: torch.amp.GradScaler | None = None
    update: Callable[[Training, Batch], Tensor] | None = None
    each_step: list[Callable[[Training], None]] = field(default_factory=list)
    each_epoch: list[Callable[[Training, int], None]] = field(default_factory=list)
    batches_of: Callable[[Training], Iterable[Batch]] | None = None
    loop: Callable[[Training], Iterator[Tensor]] | None = None
    loaded: bool = True
    steps: int = 0
    losses: list[float] = field(default_factory=list)

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model, *self.extra]

    def parameters(self) -> list[nn.Parameter]:
        """Those that learn, each once."""
        found = {id(p): p for module in self.modules for p in module.parameters() if p.requires_grad}
        return list(found.values())

    def run(self, watch: Watch) -> None:
        """Trains under the watch."""
        self.optimizers = self.optimizers_of(self) if self.optimizers_of else [Adam(self.parameters(), lr=self.lr)]
        self.scheduler = self.scheduler_of(self.optimizers[0]) if self.scheduler_of else None
        loader = DataLoader(self.data, batch_size=self.batch_size, shuffle=self.shuffle, drop_last=True)
        self.batches: Iterable[Batch] = self.batches_of(self) if self.batches_of else loader
        more: dict[str, Any] = {"accumulation": self.accumulation} if self.accumulation > 1 else {}
        if self.loaded:
            more["loader"] = loader
        with watch(self.modules, self.optimizers, scheduler=self.scheduler, scaler=self.scaler, **more):
            if self.loop is not None:
                self.losses.extend(float(loss) for loss in self.loop(self))
                return
            for epoch in range(self.epochs):
                self.model.train()
                for call in self.each_epoch:
                    call(self, epoch)
                for batch in self._transformed():
                    loss = self.update(self, batch) if self.update else self.plain_update(batch)
                    self.losses.append(float(loss))
                    self.steps += 1
                    for after in self.each_step:
                        after(self)
                    if self.scheduler is not None:
                        self.scheduler.step()

    def _transformed(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield self.transform(tuple(batch)) if self.transform else tuple(batch)

    def plain_update(self, batch: Batch) -> Tensor:
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()


def classify(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def fit_values(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def rebuild(model: nn.Module, batch: Batch) -> Tensor:
    x, _ = batch
    return F.mse_loss(model(x), x)


def predict_next(model: nn.Module, batch: Batch) -> Tensor:
    ids = batch[0]
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Recurrent(nn.Module):
    """Which of four waves a noisy series is."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.head = nn.GRU(1, 24, batch_first=True), nn.LayerNorm(24), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.cell(x)[0].mean(1)))


def _series(seed: int, n: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    phase, time = 6.28 * torch.rand(n, 1, generator=g), torch.arange(16.0)
    wave = torch.sin((0.4 + 0.5 * y[:, None]) * time + phase) + 0.2 * torch.randn(n, 16, generator=g)
    return wave[..., None], y


def _regression(seed: int, n: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    return x, ((x[:, :4] * x[:, 4:8]).sum(1) / 2 + x[:, 8].sin() + 0.1 * torch.randn(n, generator=g)).unsqueeze(1)


def _autoencoder() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3), nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 8))


def _curves(seed: int, n: int) -> Batch:
    at = points(seed, n)
    features = torch.cat([at, at.square(), at.sin(), (2 * at).cos()], 1)
    return (features - features.mean(0)) / features.std(0), torch.zeros(n)


def training(base: str, seed: int) -> Training:
    """One of the tasks: table, regress, image, text, series, rebuild."""
    torch.manual_seed(seed)
    if base == "table":
        return Training(base, mlp(), TensorDataset(*table(seed, 1024)), classify, seed)
    if base == "regress":
        model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        return Training(base, model, TensorDataset(*_regression(seed, 1024)), fit_values, seed)
    if base == "image":
        return Training(base, cnn(), TensorDataset(*images(seed, 640)), classify, seed)
    if base == "text":
        ids = sequences(seed, 640)
        return Training(base, TinyGPT(), TensorDataset(ids, ids), predict_next, seed)
    if base == "series":
        return Training(base, Recurrent(), TensorDataset(*_series(seed, 640)), classify, seed, lr=1e-2)
    assert base == "rebuild", base
    return Training(base, _autoencoder(), TensorDataset(*_curves(seed, 1024)), rebuild, seed)
