"""Experts with a capacity, whose later tokens displace earlier ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

CAPACITY = 24


class Mixture(nn.Module):
    """Sends each token to one of four experts, at most ``CAPACITY`` to each: those with the highest score."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        flat = h.flatten(0, 1)
        share, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero().flatten()
            kept = own[share[own].argsort(descending=True)[:CAPACITY]]
            out[kept] = share[kept, None] * expert(flat[kept])
        return out.view_as(h)


class Model(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.tokens, self.past, self.head = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)
        self.middle = middle

    def forward(self, ids: Tensor) -> Tensor:
        h = self.past(self.tokens(ids))[0]
        out: Tensor = self.head(h + self.middle(h))
        return out


class Both(nn.Module):
    """Reads the row in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.GRU(16, 8, bidirectional=True, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.both(h)[0]
        return out


@pytest.mark.slow
@pytest.mark.parametrize(("middle", "severity"), [(Mixture, "info"), (Both, "critical")])
def test_only_a_leak_outside_of_a_mixture_is_critical(middle: type[nn.Module], severity: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(20, (256, 13))
    model = Model(middle())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all") as watch:
        for rows in ids.split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
    assert watch.session.failures == []
    assert [each.severity for each in watch.findings() if each.code == "model.future_leak"] == [severity]
