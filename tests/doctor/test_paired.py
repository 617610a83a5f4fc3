"""An evaluation whose targets belong to other rows is told from one of a model that knows what it is asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

CODE = "law.data.evaluated_rows_have_their_targets"
Pairs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def in_order(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def a_row_later(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x[:-1], y[1:]


def sorted_apart(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y.sort().values


def said(pairs: Pairs, *, rows: int = 512, epochs: int = 6, noise: float = 0.0) -> list[str]:
    torch.manual_seed(0)
    x = torch.randn(rows + 400, 8)
    y = (x @ torch.randn(8, 4) + noise * torch.randn(rows + 400, 4)).argmax(1)
    batches = DataLoader(TensorDataset(x[:rows], y[:rows]), batch_size=32, shuffle=True)
    held_out = DataLoader(TensorDataset(*pairs(x[rows:], y[rows:])), batch_size=100)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, loader=batches, out=None, quiet=True) as watch:
        for _ in range(epochs):
            for inputs, targets in batches:
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                losses = [F.cross_entropy(model(inputs), targets).item() for inputs, targets in held_out]
            assert len(losses) == 4
    assert watch.session.failures == []
    return [each.severity for each in watch.findings() if each.code == CODE]


def test_its_own_targets_are_known() -> None:
    assert said(in_order) == []


@pytest.mark.parametrize("pairs", [a_row_later, sorted_apart])
def test_targets_of_other_rows_are_found(pairs: Pairs) -> None:
    assert said(pairs) == ["warning"]


def test_what_is_known_by_heart_is_a_remark_unless_the_targets_lie_beside() -> None:
    assert said(in_order, rows=64, epochs=60, noise=100.0) in ([], ["info"])
    assert said(a_row_later, epochs=12) == ["warning"]
