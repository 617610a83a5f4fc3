"""A random augmentation of the validation data, and data that are read without a loader and without a shuffle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainwright as tw

pytestmark = pytest.mark.slow


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, y: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        self.x, self.y, self.change = torch.randn(len(y), 3, 8, 8), y, change

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.change(self.x[index]), self.y[index]


def flipped(x: Tensor) -> Tensor:
    return x.flip(-1) if torch.rand(()) < 0.5 else x


@pytest.mark.parametrize(
    ("y", "change", "is_found", "shares"),
    [
        (torch.arange(128) ** 2 % 7, flipped, True, True),
        (torch.arange(128) ** 2 % 7, lambda x: x + torch.randn(()), True, False),
        (torch.arange(128) ** 2 % 7, torch.Tensor.clone, False, True),
        (torch.arange(128) % 4, flipped, False, True),
    ],
    ids=["augmented", "simulated", "fixed", "labels in a regular order, as of episodes"],
)
def test_validation_data_that_change(
    y: Tensor, change: Callable[[Tensor], Tensor], is_found: bool, shares: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 7))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    train, val = DataLoader(Augmented(y.clone(), flipped), 32, shuffle=True), DataLoader(Augmented(y, change), 32)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(3):
            for x, t in train:
                optimizer.zero_grad()
                F.cross_entropy(model(x), t).backward()
                optimizer.step()
            with torch.no_grad():
                right = [(model(x).argmax(1) == t).float().mean().item() for x, t in val]
            assert right
    assert watch.session.failures == []
    found = [each.severity for each in watch.findings() if each.code == "data.validation_augmented"]
    assert found == (["warning" if shares else "info"] if is_found else [])


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("is_binary", [True, False])
def test_labels_that_ascend_without_a_loader(is_sorted: bool, is_binary: bool) -> None:
    torch.manual_seed(0)
    y = torch.randint(2 if is_binary else 5, (640,))
    y = y.sort().values if is_sorted else y
    x = torch.randn(640, 8) + y[:, None]
    model = nn.Linear(8, 1 if is_binary else 5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for rows in torch.arange(640).split(16):
            optimizer.zero_grad()
            scores = model(x[rows])
            if is_binary:
                F.binary_cross_entropy_with_logits(scores[:, 0], y[rows].float()).backward()
            else:
                F.cross_entropy(scores, y[rows]).backward()
            optimizer.step()
    assert ("data.unshuffled" in {each.code for each in watch.findings()}) == is_sorted
