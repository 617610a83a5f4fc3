"""A column of the inputs that is the target leaks only where the prediction for that target sees it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw


class Density(nn.Module):
    """Of two whole numbers: the first by its frequency, or from the number itself, the second given the first."""

    def __init__(self, *, sees_itself: bool) -> None:
        super().__init__()
        self.first = nn.Linear(2, 8)
        self.second = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 8))
        self.sees_itself = sees_itself

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x if self.sees_itself else torch.zeros_like(x)), self.second(x[:, :1] / 4 - 1)


@pytest.mark.slow
@pytest.mark.parametrize("sees_itself", [False, True])
def test_a_density_of_parts_given_those_before_has_no_leak(sees_itself: bool) -> None:
    torch.manual_seed(0)
    first = torch.randint(0, 8, (512, 1))
    x = torch.cat([first, (first + torch.randint(0, 3, (512, 1))) % 8], 1)
    model = Density(sees_itself=sees_itself)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for rows in torch.randperm(512).split(64):
            one, other = model(x[rows].float())
            optimizer.zero_grad()
            (F.cross_entropy(one, x[rows, 0]) + F.cross_entropy(other, x[rows, 1])).backward()
            optimizer.step()
    assert watch.session.failures == []
    assert ("data.target_leak" in {each.code for each in watch.findings()}) == sees_itself
