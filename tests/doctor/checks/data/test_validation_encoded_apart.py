"""Scalers and category codes that are computed from the validation data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

pytestmark = pytest.mark.slow


def codes(model: nn.Module, train: Tensor, val: Tensor) -> list[str]:
    """The findings after two epochs, each with an evaluation of ``val``."""
    torch.manual_seed(0)
    y, y_val = (torch.randint(2, (len(x),)) for x in (train, val))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(2):
            for rows, targets in DataLoader(TensorDataset(train, y), 40, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(model(rows), targets).backward()
                optimizer.step()
            with torch.no_grad():
                for rows, targets in DataLoader(TensorDataset(val, y_val), 50):
                    F.cross_entropy(model(rows), targets)
    assert watch.session.failures == []
    return [each.code for each in watch.findings() if each.code == "data.validation_encoded_apart"]


def standardized(x: Tensor, of: Tensor) -> Tensor:
    wide = of.double()
    return ((x.double() - wide.mean(0)) / wide.std(0, correction=0)).float()


def of_numbers(*, apart: bool, of_training: bool = False) -> list[str]:
    torch.manual_seed(1)
    train, val = torch.rand(400, 6), torch.rand(100, 6) + 0.2
    scaled = standardized(train, train)
    evaluated = scaled if of_training else standardized(val, val if apart else train)
    return codes(nn.Linear(6, 2), scaled, evaluated)


def test_a_scaler_that_was_fitted_on_the_validation_data_is_found() -> None:
    assert of_numbers(apart=True) == ["data.validation_encoded_apart"]
    assert of_numbers(apart=False) == []


def test_training_rows_may_be_evaluated() -> None:
    assert of_numbers(apart=False, of_training=True) == []


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids).mean(1))
        return out


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "healthy"])
def test_codes_of_categories(apart: bool) -> None:
    torch.manual_seed(1)
    frequency = 1 / torch.arange(1.0, 61) ** 0.9
    mixed = [frequency[torch.randperm(60)] for _ in range(3)]
    train = torch.stack([torch.multinomial(each, 2000, True) for each in mixed], 1)
    val = torch.stack([torch.multinomial(each, 150, True) for each in mixed], 1)
    if apart:
        val = torch.stack([torch.unique(each, return_inverse=True)[1] for each in val.T], 1)
    assert codes(Sum(), train, val) == ["data.validation_encoded_apart"] * apart


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(80, 4), nn.Embedding(60, 4)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(1)


def of_ratings(*, apart: bool) -> list[str]:
    """The findings for users and items in two vectors. Half of both are evaluated."""
    torch.manual_seed(1)
    users, items = torch.randint(80, (3000,)), torch.randint(60, (3000,))
    is_val = (users % 2 == 1) & (items % 2 == 1)
    model, scores = Factors(), torch.randn(3000)
    val = torch.stack([users, items])[:, is_val]
    if apart:
        val = torch.stack([torch.unique(each, return_inverse=True)[1] for each in val])
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    data = TensorDataset(users[~is_val], items[~is_val], scores[~is_val])
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(2):
            for user, item, score in DataLoader(data, 50, shuffle=True):
                optimizer.zero_grad()
                F.mse_loss(model(user, item), score).backward()
                optimizer.step()
            with torch.no_grad():
                F.mse_loss(model(*val), scores[is_val])
    assert watch.session.failures == []
    return [each.code for each in watch.findings() if each.code.startswith("data.")]


def test_codes_in_several_vectors() -> None:
    assert of_ratings(apart=True) == ["data.validation_encoded_apart"]
    assert of_ratings(apart=False) == []
