"""Class weights that rise with the frequencies of the classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

SIZES = {2: torch.tensor([900, 100]), 4: torch.tensor([400, 250, 90, 60])}


def is_found(classes: int, power: float, *, binary: bool = False) -> bool:
    torch.manual_seed(0)
    counts = SIZES[classes]
    y = torch.repeat_interleave(torch.arange(classes), counts)
    x = torch.randn(classes, 6)[y] + torch.randn(len(y), 6)
    weight = counts.double().pow(power).float()
    model = nn.Linear(6, 1 if binary else classes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(at: Tensor) -> Tensor:
        if binary:
            return F.binary_cross_entropy_with_logits(
                model(x[at])[:, 0], y[at].float(), pos_weight=weight[1] / weight[0]
            )
        return F.cross_entropy(model(x[at]), y[at], weight=weight / weight.mean())

    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for at in torch.randperm(len(y)).repeat(2).split(64):
            optimizer.zero_grad()
            loss(at).backward()
            optimizer.step()
    assert watch.session.failures == []
    return any(each.code == "loss.class_weights_inverted" for each in watch.findings())


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "binary"), [(2, False), (4, False), (2, True)])
def test_weights_that_rise_with_the_frequencies_are_found(classes: int, binary: bool) -> None:
    assert is_found(classes, 1.0, binary=binary)


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "binary"), [(2, False), (4, False), (2, True)])
def test_weights_that_fall_are_right(classes: int, binary: bool) -> None:
    assert not is_found(classes, -1.0, binary=binary)
