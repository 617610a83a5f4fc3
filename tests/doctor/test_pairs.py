"""Losses without targets: which rows of the inputs belong together matters in the end, or nothing was learned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.law_loops import states

pytestmark = pytest.mark.slow  # watched loops, each of a second

ROWS, WIDTH, ITEMS = 32, 6, 40


class Factors(nn.Module):
    """Scores of items for users, from what is known of each."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(-1)


class Towers(Factors):
    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return 4.0 * F.normalize(self.user(user), dim=-1) @ F.normalize(self.item(item), dim=-1).T


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def ranked(model: nn.Module, user: Tensor, liked: Tensor, other: Tensor) -> Tensor:
    return -F.logsigmoid(model(user, liked) - model(user, other)).mean()


def broadcast(model: nn.Module, user: Tensor, liked: Tensor, other: Tensor) -> Tensor:
    right = model(user.unsqueeze(1), liked)
    return -F.logsigmoid(right).mean() - F.logsigmoid(-model(user, other)).mean()


def contrasted(model: nn.Module, user: Tensor, liked: Tensor, other: Tensor) -> Tensor:
    scores = model(user, liked)
    return -scores.log_softmax(1).diagonal().mean()


def beside(model: nn.Module, user: Tensor, liked: Tensor, other: Tensor) -> Tensor:
    return contrasted(model, user, liked[torch.randperm(ROWS)], other)


def of_drawn_pairs(model: nn.Module, user: Tensor, liked: Tensor, other: Tensor) -> Tensor:
    """Any of one set is ranked above any of another."""
    return -F.logsigmoid(model(user + 0.5) - model(other)).mean()


def of_sets(model: nn.Module, user: Tensor, liked: Tensor, other: Tensor) -> Tensor:
    return (model(user).mean() - model(liked).mean()).square() + 0.1


@pytest.mark.parametrize(
    ("make", "loss", "state"),
    [
        (Factors, ranked, "held"),
        (Towers, contrasted, "held"),
        (Scores, of_drawn_pairs, "held"),
        (Scores, of_sets, "not applicable"),
        (Factors, broadcast, "broken"),
        (Towers, beside, "broken"),
    ],
)
def test_pairs_are_learned(make: Callable[[], nn.Module], loss: Loss, state: str) -> None:
    torch.manual_seed(0)
    model, turn = make(), torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for _ in range(240):
            user, other = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
            liked = user @ turn + 0.1 * torch.randn(ROWS, WIDTH)
            optimizer.zero_grad()
            loss(model, user, liked, other).backward()
            optimizer.step()
    assert watch.session.failures == []
    law = states(watch, "loss")["pairs_are_learned"]
    assert (law.state, law.why) == (state, law.why)
