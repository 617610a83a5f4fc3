"""Attention takes averages of values that it tells apart; each law is broken by several mistakes, at its module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.law_loops import found, states
from tests.rows import each_row

pytestmark = pytest.mark.slow

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attend(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.query, self.key, self.value, self.mix = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.query(x), self.key(x), self.value(x))


def of_scores(weigh: Callable[[Tensor], Tensor]) -> Mix:
    return lambda q, k, v: weigh(q @ k.mT / 8**0.5) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def masked(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -1e9).softmax(-1)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax of the keys is over the positions."""
    return q.softmax(-1) @ (k.softmax(1).mT @ v)


def watched(mix: Mix, steps: int) -> tw.Watch:
    torch.manual_seed(0)
    model = nn.Sequential(Attend(mix), nn.Flatten(), nn.Linear(48, 3))
    x, y = torch.randn(64, 6, 8), torch.arange(64) % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, laws=["function"]) as watch:
        for step in range(steps):
            rows = torch.arange(16) + 16 * (step % 4)
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    assert watch.session.failures == []
    return watch


@each_row(
    ("mix", "state"),
    [
        (of_scores(lambda scores: scores.softmax(-1)), "held"),
        (of_scores(masked), "held"),
        (of_scores(lambda scores: F.dropout(scores.softmax(-1), 0.5)), "held"),
        (fused, "held"),
        (linear, "held"),
        (of_scores(lambda scores: scores.softmax(1)), "broken"),
        (of_scores(lambda scores: scores.softmax(0)), "broken"),
        (lambda q, k, v: (v.mT @ (q @ k.mT).softmax(-1)).mT, "broken"),
        (lambda q, k, v: v, "not applicable"),
    ],
)
def test_attention_is_an_average(mix: Mix, state: str) -> None:
    watch = watched(mix, 2)
    assert states(watch, "function")["attention_is_an_average"].state == state
    if state == "broken":
        assert found(watch, "law.function.attention_is_an_average").where.module == "0"


@each_row(
    ("mix", "steps", "state"),
    [
        (of_scores(lambda scores: scores.softmax(-1)), 48, "held"),
        (of_scores(lambda scores: (scores / 8**4.5).softmax(-1)), 48, "broken"),
        (of_scores(lambda scores: (1e-5 * scores).softmax(-1)), 48, "broken"),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1e-5), 48, "broken"),
        (of_scores(lambda scores: (1e-5 * scores).softmax(-1)), 8, "not applicable"),
    ],
)
def test_attention_tells_apart(mix: Mix, steps: int, state: str) -> None:
    assert states(watched(mix, steps), "function")["attention_tells_apart"].state == state
