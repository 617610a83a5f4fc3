"""Zoo, group K: memory that grows from step to step."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from zoo.host import Watch, fault, loader, mlp, table, train


class Deep(nn.Module):
    """Many small residual layers, so that each step has a large autograd graph."""

    def __init__(self, depth: int = 24, d: int = 32) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(20, d), nn.Linear(d, 10)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU()) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@fault("K01", "resources.graphs_kept", delay="M", fixable=False)
def total_keeps_graphs(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = loader(*table(seed), seed)
    with watch(model, optimizer, loader=batches):
        total: Any = 0.0
        for _ in range(8):
            for _, x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                total += loss


@fault("K02", "resources.graphs_kept", delay="M", fixable=False)
def outputs_kept(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(classes=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = loader(*table(seed, n=12800, classes=256), seed, batch=256)
    with watch(model, optimizer, loader=batches):
        scores = []
        for _ in range(2):
            outputs, targets = [], []
            for _, x, y in batches:
                optimizer.zero_grad()
                logits = model(x)
                loss = F.cross_entropy(logits, y)
                loss.backward()
                optimizer.step()
                outputs.append(logits)
                targets.append(y)
            scores.append((torch.cat(outputs).argmax(1) == torch.cat(targets)).float().mean().item())


class EchoState(nn.Module):
    """One step of a recurrent net whose recurrent weights are fixed: ``(x, h) -> (logits, h)``."""

    reservoir: Tensor

    def __init__(self, features: int = 20, d: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(features, d), nn.Linear(d, classes)
        self.register_buffer("reservoir", 0.5 * d**-0.5 * torch.randn(d, d))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.embed(x) + h @ self.reservoir)
        return self.head(h), h


@fault("K03", "resources.graph_grows", delay="M", active=2, fixable=False)
def state_carries_its_graph(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = EchoState()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = loader(*table(seed, n=4096), seed, batch=128)
    with watch(model, optimizer, loader=batches):
        h = torch.zeros(128, 64)
        for _ in range(4):
            for _, x, y in batches:
                optimizer.zero_grad()
                logits, h = model(x, h)
                loss = F.cross_entropy(logits, y)
                loss.backward(retain_graph=True)
                optimizer.step()


class Listed(Dataset[tuple[int, list[float], int]]):
    """Samples as Python objects in a list: reading one writes its reference count, so forked workers copy its page."""

    def __init__(self, seed: int, n: int) -> None:
        draw = random.Random(seed)
        self.rows = [[draw.random() for _ in range(4)] for _ in range(n)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, list[float], int]:
        row = self.rows[index]
        return index, row, int(row[0] > row[1])


def collate(samples: list[tuple[int, list[float], int]]) -> tuple[Tensor, Tensor, Tensor]:
    index, rows, y = zip(*samples)
    return torch.tensor(index), torch.tensor(rows), torch.tensor(y)


@fault("K04", "resources.workers_copy_dataset", delay="M", fixable=False)
def workers_copy_on_write(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(features=4, classes=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = DataLoader(
        Listed(seed, n=120_000), batch_size=600, shuffle=True, collate_fn=collate, num_workers=2,
        persistent_workers=True, multiprocessing_context="fork",
    )  # fmt: skip
    train(watch, model, optimizer, batches, epochs=1)
