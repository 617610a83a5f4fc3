"""Zoo, group T: faults of train and eval mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.host import Watch, fault, loader, table


def normed(features: int = 20, classes: int = 10, width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(width, classes),
    )  # fmt: skip


def accuracy(logits: Tensor, y: Tensor) -> float:
    return (logits.argmax(1) == y).float().mean().item()


@fault("T01", "loop.trains_in_eval_mode", delay="S", active=9, fixable=False)
def never_back_to_train(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = table(seed, n=768)
    batches, (x_val, y_val) = loader(x[:512], y[:512], seed), (x[512:], y[512:])
    with watch(model, optimizer, loader=batches):
        scores = []
        for _ in range(10):
            for _, x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                scores.append(accuracy(model(x_val), y_val))


@fault("T02", "evaluation.in_train_mode", delay="S", active=8, fixable=False)
def validated_in_train_mode(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = table(seed, n=768)
    batches, (x_val, y_val) = loader(x[:512], y[:512], seed), (x[512:], y[512:])
    with watch(model, optimizer, loader=batches):
        scores = []
        for _ in range(10):
            model.train()
            for _, x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                scores.append(accuracy(model(x_val), y_val))


class AlwaysDropping(nn.Module):
    """Calls ``F.dropout`` without ``training=self.training``: it drops in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.first(x)), 0.3)
        x = F.dropout(F.relu(self.second(x)), 0.3)
        return self.head(x)


@fault("T03", "evaluation.dropout_ignores_mode", delay="S")
def dropout_without_mode(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = AlwaysDropping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = table(seed, n=768)
    batches, (x_val, y_val) = loader(x[:512], y[:512], seed), (x[512:], y[512:])
    with watch(model, optimizer, loader=batches):
        scores = []
        for _ in range(10):
            model.train()
            for _, x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                scores.append(accuracy(model(x_val), y_val))
