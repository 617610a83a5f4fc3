"""Class weights in the order of the class numbers as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw

pytestmark = pytest.mark.slow

CLASSES = 12
SIZES = torch.tensor([120, 90, 14, 20, 60, 80, 70, 50, 90, 60, 330, 300])


def codes(order: Callable[[int], object], power: float = 1.0) -> list[str]:
    torch.manual_seed(0)
    y = torch.repeat_interleave(torch.arange(CLASSES), SIZES)
    x = torch.randn(CLASSES, 8)[y] + torch.randn(len(y), 8)
    weight = SIZES[sorted(range(CLASSES), key=order)].double().pow(-power).float()  # type: ignore[arg-type]
    model = nn.Linear(8, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for rows in torch.randperm(len(y)).repeat(2).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows], weight=weight / weight.mean()).backward()
            optimizer.step()
    assert watch.session.failures == []
    return [each.code for each in watch.findings() if each.code == "loss.class_weights_permuted"]


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_weights_in_the_order_of_strings_are_found(power: float) -> None:
    assert codes(str, power) == ["loss.class_weights_permuted"]


@pytest.mark.parametrize("order", [int, lambda n: -n, lambda n: int(SIZES[n])], ids=["right", "reversed", "by_size"])
def test_other_weights_are_not_reported(order: Callable[[int], object]) -> None:
    """Right ones, and weights that do not follow the frequencies of the classes."""
    assert codes(order) == []
