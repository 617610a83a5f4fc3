"""Datasets, models and observers that slow a loop down, to be named in recipes."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

WAIT_S = 0.003


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Random rows; reading one takes ``wait_s``."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.x, self.y = torch.randn(512, 16), torch.randint(4, (512,))
        self.wait_s = wait_s

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.wait_s:
            time.sleep(self.wait_s)
        return self.x[index], self.y[index]


class Net(nn.Module):
    """Two layers, after ``tiny`` small operators and, with ``syncs``, a value that is read on the host."""

    def __init__(self, tiny: int = 0, syncs: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.tiny, self.syncs = tiny, syncs

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.tiny):
            x = x + 1e-6
        if self.syncs and x.sum().item() > 1e9:
            x = -x
        return self.layers(x)


def in_memory() -> Dataset[tuple[Tensor, ...]]:
    """Returns the rows four times in a TensorDataset, which is read in full batches."""
    rows = Rows()
    return TensorDataset(rows.x.repeat(4, 1), rows.y.repeat(4))


class Wide(nn.Sequential):
    """Nearly all time of a step is one matrix product."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4))


def slow_callback(result: object, state: object) -> None:
    """An observer."""
    time.sleep(10 * WAIT_S)


class Pictures(nn.Module):
    """A convolution, which may keep its weights channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 2 * 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.view(-1, 1, 4, 4)).flatten(1))
