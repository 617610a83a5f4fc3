"""What is counted of ranks is at its best where the target has the largest score."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.law_loops import states

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

ITEMS, WIDTH = 20, 8


def evaluated(hit: Callable[[Tensor, Tensor], Tensor], name: str = "hit_rate") -> str:
    torch.manual_seed(0)
    x = torch.randn(128, WIDTH)
    y = (x @ torch.randn(WIDTH, ITEMS)).argmax(1)
    model = nn.Linear(WIDTH, ITEMS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shown: dict[str, float] = {}
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(13):
            optimizer.zero_grad()
            F.cross_entropy(model(x[:64]), y[:64]).backward()
            optimizer.step()
            if step % 3 == 2:
                with torch.no_grad():
                    hits = sum(hit(model(a), b).sum().item() for a, b in zip(x[64:].split(16), y[64:].split(16)))
                shown = {name: hits / 64}
    assert shown and watch.session.failures == []
    return states(watch, "data")["perfect_predictions_are_right"].state


def rank(scores: Tensor, y: Tensor) -> Tensor:
    return (scores > scores.gather(1, y[:, None])).sum(1)


def filtered(scores: Tensor, y: Tensor) -> Tensor:
    """Others that are liked, too, are put away."""
    liked = (torch.arange(ITEMS) % 3 == 0).expand(len(y), -1) & (torch.arange(ITEMS) != y[:, None])
    return rank(scores.masked_fill(liked, -torch.inf), y)


def among_some(scores: Tensor, y: Tensor) -> Tensor:
    """Of which the target is put away after its score was read."""
    wanted = scores.gather(1, y[:, None])
    return (scores.masked_fill(torch.arange(ITEMS) == y[:, None], -torch.inf) >= wanted).sum(1)


def put_away(scores: Tensor, y: Tensor) -> Tensor:
    """The target itself is among what is put away."""
    return rank(scores.masked_fill(torch.arange(ITEMS) == y[:, None], -torch.inf), y)


@pytest.mark.parametrize(
    ("hit", "state"),
    [
        (lambda out, y: rank(out, y) < 5, "held"),
        (lambda out, y: 1 + rank(out.softmax(1), y) <= 5, "held"),
        (lambda out, y: filtered(out, y) < 5, "held"),
        (lambda out, y: among_some(out, y) < 5, "held"),
        (lambda out, y: rank(-out, y) > 15, "not applicable"),
        (lambda out, y: (out < out.gather(1, y[:, None])).sum(1) >= 15, "not applicable"),
        (lambda out, y: 1 / (rank(out, y) + 1.0), "held"),
        (lambda out, y: rank(out, y) > 5, "broken"),
        (lambda out, y: filtered(out, y) >= 5, "broken"),
        (lambda out, y: put_away(out, y) < 5, "broken"),
        (lambda out, y: 1 / (1.0 - rank(out, y)).abs().clamp(min=0.05), "not applicable"),
    ],
)
def test_hits_are_most_where_the_target_is_first(hit: Callable[[Tensor, Tensor], Tensor], state: str) -> None:
    assert evaluated(hit) == state
