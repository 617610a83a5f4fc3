"""Validation inputs in another usual scale than those of training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

Scale = Callable[[Tensor], Tensor]
PIXELS = torch.randint(0, 256, (256, 3, 8, 8), generator=torch.Generator().manual_seed(0)).float()
SCALES: dict[str, Scale] = {
    "bytes": lambda x: x,
    "fractions": lambda x: x / 255,
    "centred": lambda x: x / 127.5 - 1,
    "standardized": lambda x: (x - 120) / 70,
    "logarithms": lambda x: x.log1p(),
}


def is_found(train: str, *evaluated: str) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    x, y = SCALES[train](PIXELS), torch.randint(2, (256,))
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for rows in torch.arange(256).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            for name in evaluated:
                for rows in torch.arange(128).split(64):
                    F.cross_entropy(model(SCALES[name](PIXELS[rows])), y[rows]).item()
    assert watch.session.failures == []
    return "data.validation_scaled_apart" in {each.code for each in watch.findings()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "val"),
    [("standardized", "fractions"), ("fractions", "bytes"), ("centred", "fractions"), ("fractions", "standardized")],
)
def test_another_scale_is_found(train: str, val: str) -> None:
    assert is_found(train, val)


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_the_same_scale_is_healthy(scale: str) -> None:
    assert not is_found(scale, scale)


@pytest.mark.slow
def test_a_scale_that_is_not_known_is_healthy() -> None:
    assert not is_found("standardized", "logarithms")
