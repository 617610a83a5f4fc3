"""Tests of loop.result_discarded."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from tests.doctor.checks.loops import alarms, mlp, watched

pytestmark = pytest.mark.slow
CODE = "loop.result_discarded"


class Masked(nn.Module):
    """Discards the result of ``masked_fill`` if ``how`` is ``discarded``, and always that of calls with an effect."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how, self.seen = mlp(), how, set[int]()
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.1)

    def remember(self, x: Tensor) -> int:
        self.seen.add(len(x))
        return len(x)

    def forward(self, x: Tensor) -> Tensor:
        self.remember(x)
        self.norm(x)
        F.relu(x.clone(), inplace=True)
        if self.how == "discarded":
            x.masked_fill(x < -2, 0.0)
        elif self.how == "layer":
            self.dropout(x)
        else:
            x = x.masked_fill(x < -2, 0.0)
        made: Tensor = self.layers(x)
        return made


@pytest.mark.parametrize(("how", "found"), [("discarded", True), ("layer", True), ("assigned", False)])
def test_in_a_model(how: str, found: bool) -> None:
    """A statement in a condition counts only if it ran."""
    assert (CODE in alarms(watched(Masked(how)))) == found


class Shifted(Dataset[tuple[Tensor, int]]):
    def __init__(self, how: str) -> None:
        self.how, self.last = how, 0

    def __len__(self) -> int:
        return 64

    def shift(self, x: Tensor) -> Tensor:
        """Shift by a random distance."""
        return x.roll(random.randint(0, 3))

    def note(self, index: int) -> int:
        self.last = index
        return index

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        self.note(index)
        if self.how == "discarded":
            self.shift(x)
        return (x if self.how == "discarded" else self.shift(x)), int(x.sum() > 0)


def trained(how: str) -> tw.Watch:
    model, data = mlp(), DataLoader(Shifted(how), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, loader=data, out=None, quiet=True) as watch:
        for _ in range(2):
            for x, y in data:
                step(model, optimizer, x, y)
    assert watch.session.failures == []
    return watch


@pytest.mark.parametrize(("how", "found"), [("discarded", True), ("assigned", False)])
def test_in_a_data_set(how: str, found: bool) -> None:
    watch = trained(how)
    assert (CODE in alarms(watch)) == found
    if found:
        (one,) = (each for each in watch.findings() if each.code == CODE)
        assert one.where.source is not None and "self.shift" in one.symptom


def test_a_method_that_is_not_called() -> None:
    model, data = mlp(), DataLoader(Shifted("assigned"), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, loader=data, out=None, quiet=True) as watch:
        for x, y in data:
            model.train  # noqa: B018
            step(model, optimizer, x, y)
    assert CODE in alarms(watch)


def test_a_method_that_is_not_called_in_a_condition_that_is_not_traced() -> None:
    model, data = mlp(), DataLoader(Shifted("assigned"), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, loader=data, out=None, quiet=True) as watch:
        for x, y in data:
            model.train()
            step(model, optimizer, x, y)
            if len(x) > 8:
                model.eval  # noqa: B018
    assert alarms(watch) == []


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
