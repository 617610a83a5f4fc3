"""The recommender and the interactions that it learns from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainwright.data.interactions import interactions
from trainwright.errors import UsageError
from trainwright.models.two_tower import two_tower


def test_the_scores_are_the_products_of_the_two_towers() -> None:
    torch.manual_seed(0)
    model = two_tower(users=7, classes=5, d_model=4, hidden=3)
    user_B = torch.tensor([6, 0, 6])
    scores_BI = model(user_B)
    assert scores_BI.shape == (3, 5) and torch.equal(scores_BI[0], scores_BI[2])
    torch.testing.assert_close(scores_BI[1, 4], model.user(torch.tensor(0)) @ model.item(torch.tensor(4)))
    scores_BI.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    ids, layers = (7 + 5) * 4, 2 * (4 * 3 + 3 + 3 * 4 + 4)
    assert sum(parameter.numel() for parameter in model.parameters()) == ids + layers


def test_choices_follow_the_known_probabilities() -> None:
    train, val = interactions(users=20, items=30, per_user=400), interactions("val", users=20, items=30, per_user=400)
    assert (len(train), len(val), train.classes) == (8000, 2000, 30)
    assert torch.equal(train.chance_UI, val.chance_UI) and train.content_sha256() != val.content_sha256()
    counts_UI = torch.zeros(20, 30).index_put((train.users, train.items), torch.ones(8000), accumulate=True)
    torch.testing.assert_close(counts_UI / 400, train.chance_UI, rtol=0, atol=0.12)
    recalls, losses = train.recalls(5), train.references()
    top_UK = train.chance_UI.topk(5, dim=1).indices
    hits = (top_UK[val.users] == val.items[:, None]).any(1).float().mean()
    assert float(hits) == pytest.approx(recalls["best"], abs=0.03)
    assert recalls["chance"] == 5 / 30 < recalls["popular"] < recalls["best"]
    assert losses["chance"] == math.log(30) > losses["popular"] > losses["best"]
    nats = -train.chance_UI[val.users, val.items].log().mean()
    assert float(nats) == pytest.approx(losses["best"], abs=0.1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: interactions("test"), "split must be"),  # type: ignore[arg-type]
        (lambda: interactions(per_user=1), "too few"),
        (lambda: two_tower(users=0, classes=3), "users must be"),
    ],
    ids=["split", "few", "users"],
)
def test_wrong_options_are_refused_with_a_remedy(call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        call()
    assert caught.value.remedy
