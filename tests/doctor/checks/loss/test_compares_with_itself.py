"""Contrastive losses whose diagonal is a negative pair."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unmasked", "masked", "two encoders"])
def test_only_a_diagonal_that_is_a_negative_pair_is_found(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    x = torch.randn(512, 8)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for rows in x.split(16):
            views = [F.normalize(model(rows + 0.1 * torch.randn_like(rows)), dim=1) for _ in range(2)]
            z = torch.cat(views)
            scores = views[0] @ views[1].T / 0.1 if kind == "two encoders" else z @ z.T / 0.1
            if kind == "masked":
                scores = scores.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
            half = torch.arange(len(rows))
            target = half if kind == "two encoders" else torch.cat([half + len(rows), half])
            optimizer.zero_grad()
            F.cross_entropy(scores, target).backward()
            optimizer.step()
    assert watch.session.failures == []
    codes = [each.code for each in watch.findings()]
    assert ("loss.compares_with_itself" in codes) == (kind == "unmasked")
