"""Functions that return arguments of ``tw.fit``, for the tests of commands."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def dataset() -> TensorDataset:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, (x.sum(1) > 0).long())


def make() -> tuple[nn.Module, DataLoader[Any], nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, DataLoader(dataset(), 8, shuffle=True), nn.CrossEntropyLoss(), optimizer


def make_by_name() -> dict[str, Any]:
    """Returns the arguments by name, with further ones."""
    model, data, loss, optimizer = make()
    more = {"optimizer": optimizer, "val": DataLoader(dataset(), 16), "metrics": ["accuracy"]}
    return {"model": model, "data": data, "loss": loss, **more}


def make_without_optimizer() -> tuple[nn.Module, DataLoader[Any], nn.Module]:
    return make()[:3]


def number() -> int:
    return 3
