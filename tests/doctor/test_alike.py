"""Inputs of an evaluation beside those of training: further ones, sizes of pictures, and those of the last test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import EvaluationFacts

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

ALIKE = "law.data.evaluation_is_alike"
Prepare = Callable[[Tensor], Tensor]


class Mixed(nn.Module):
    """Rows, and a matrix by which they are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        h: Tensor = self.out(matrix @ F.relu(self.into(x)))
        return h


def evaluated_with(test: Prepare) -> tw.Watch:
    """Evaluates at every fifth step, and once more in the end, with another matrix perhaps."""
    torch.manual_seed(0)
    x, matrix = torch.randn(64, 6), 0.5 * torch.eye(64) + torch.rand(64, 64) / 64
    y = (matrix @ x @ torch.randn(6, 3)).argmax(1)
    model = Mixed()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    @torch.no_grad()
    def evaluate(matrix: Tensor) -> float:
        model.eval()
        loss = F.cross_entropy(model(x, matrix)[32:], y[32:]).item()
        model.train()
        return loss

    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(50):
            loss = F.cross_entropy(model(x, matrix)[:32], y[:32])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 4:
                val_loss = evaluate(matrix)
        test_loss = evaluate(test(matrix))
    assert watch.session.failures == [] and val_loss > 0 and test_loss > 0
    return watch


def codes(watch: tw.Watch) -> list[str]:
    return [each.code for each in watch.findings() if each.severity == "warning"]


def test_the_last_test_is_looked_at() -> None:
    watch = evaluated_with(lambda matrix: matrix)
    facts = Case(watch.records).newest(EvaluationFacts)
    assert facts is not None and facts.after == 50
    assert [each for each in codes(watch) if each.startswith("law.data")] == []


def test_a_further_input_that_is_ten_times_as_wide_is_found() -> None:
    assert ALIKE in codes(evaluated_with(lambda matrix: 20 * matrix))


@pytest.mark.parametrize(
    ("augmented", "expected"),
    [
        (lambda x: F.pad(x, (1, 1, 1, 1))[:, :, 1:11, :10], []),
        (lambda x: F.pad(x, (1, 1, 1, 1))[:, :, 1:10, :10], [ALIKE]),
        (lambda x: x[:, :, :8, :8], []),
        (lambda x: x[:, :, :9, :9], []),
        (lambda x: x[:, :, :5, :], []),
    ],
)
def test_pictures_that_are_a_pixel_short_on_one_side(augmented: Prepare, expected: list[str]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(160, 1, 10, 10), torch.randint(3, (160,))
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for rows in 2 * list(torch.arange(96).split(16)):
            loss = F.cross_entropy(model(augmented(x[rows])), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rows[0] == 80:
                with torch.no_grad():
                    assert F.cross_entropy(model(x[96:]), y[96:]).item() > 0
    assert [each for each in codes(watch) if each == ALIKE] == expected


@pytest.mark.parametrize(("factor", "found"), [(1.0, False), (1000.0, True)])
def test_a_part_of_the_features_that_is_prepared_by_the_rest(factor: float, found: bool) -> None:
    """Whole sequences are normalised by what is past of them, which has other units in training."""
    torch.manual_seed(0)
    rows = 3 + torch.randn(192, 1) + torch.randn(192, 24).cumsum(1) / 3
    model = nn.Sequential(nn.Linear(23, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_of(rows: Tensor, factor: float) -> Tensor:
        past = factor * rows[:, :18]
        whole = (torch.cat([past, rows[:, 18:]], dim=1) - past.mean(1, keepdim=True)) / past.std(1, keepdim=True)
        return F.smooth_l1_loss(model(whole[:, :-1]).squeeze(1), whole[:, -1])

    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(60):
            optimizer.zero_grad()
            loss_of(rows[torch.randint(128, (32,))], factor).backward()
            optimizer.step()
            if step % 20 == 19:
                with torch.no_grad():
                    assert loss_of(rows[128:], 1.0).item() > 0
    assert (ALIKE in codes(watch)) == found
