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

TARGETS, DECISIONS = "law.data.evaluated_rows_have_their_targets", "law.data.decisions_agree_with_the_loss"
PERFECT = "law.data.perfect_predictions_are_right"
Pairs = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def in_order(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def a_row_later(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x[:-1], y[1:]


def sorted_apart(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y.sort().values


def said(pairs: Pairs, *, rows: int = 512, epochs: int = 4, noise: float = 0.0) -> list[str]:
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
    return [each.severity for each in watch.findings() if each.code == TARGETS]


def test_its_own_targets_are_known() -> None:
    assert said(in_order) == []


@pytest.mark.parametrize("pairs", [a_row_later, sorted_apart])
def test_targets_of_other_rows_are_found(pairs: Pairs) -> None:
    assert said(pairs) == ["warning"]


def test_what_is_known_by_heart_is_a_remark_unless_the_targets_lie_beside() -> None:
    assert said(in_order, rows=64, epochs=30, noise=100.0) in ([], ["info"])
    assert said(a_row_later, epochs=8) == ["warning"]


def decided(decide: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """What is said of an evaluation whose decisions are those of another part of the model than its loss."""
    torch.manual_seed(0)
    x = torch.randn(900, 8)
    y = (x @ torch.randn(8, 3) > 0).float()
    into, out = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 3)
    model = nn.Sequential(into, out)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for rows in 3 * list(torch.arange(512).split(32)):
            loss = F.binary_cross_entropy_with_logits(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rows[0] % 128 == 0:
                with torch.no_grad():
                    told = F.binary_cross_entropy_with_logits(model(x[512:]), y[512:]).item()
                    right = decide(out(into(x[512:])), y[512:]).float().mean().item()
                    assert told > 0 and not right < 0
    assert watch.session.failures == []
    return [each.code for each in watch.findings() if each.code in (TARGETS, DECISIONS, PERFECT)]


@pytest.mark.parametrize(
    ("decide", "expected"),
    [
        (lambda out, y: (out > 0) == (y > 0.5), []),
        (lambda out, y: (out < 0) == (y > 0.5), [PERFECT]),
        (lambda out, y: (-out > 0).float() == y, [DECISIONS]),
        (lambda out, y: (out > 0) == (y > 500), [DECISIONS]),
        (lambda out, y: out > 0, []),
        (lambda out, y: (out > 0) / 0.0 * y, []),
        (lambda out, y: out.sum(1) == out.sum(1), []),
    ],
)
def test_decisions_are_right_where_the_loss_is_low(
    decide: Callable[[Tensor, Tensor], Tensor], expected: list[str]
) -> None:
    assert decided(decide) == expected
