"""The U-Net."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trainwright.engine.losses import cross_entropy
from trainwright.errors import DataError, UsageError
from trainwright.models.unet import unet


def test_a_unet_has_the_number_of_parameters_of_public_implementations() -> None:
    with torch.device("meta"):
        model = unet(classes=2)
    assert sum(parameter.numel() for parameter in model.parameters()) == 31_037_698  # milesial/Pytorch-UNet
    assert len(model.blocks) == 9


def test_every_weight_gets_a_gradient_and_every_pixel_an_output() -> None:
    model = unet(classes=4, channels=2, width=4, depth=2)
    out = model(torch.randn(3, 2, 8, 12))
    assert out.shape == (3, 4, 8, 12)
    out.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_cross_entropy_counts_pixels() -> None:
    torch.manual_seed(0)
    model, x = unet(classes=3, width=4, depth=1), torch.randn(2, 3, 4, 4)
    target = torch.randint(0, 3, (2, 4, 4))
    target[0, 0, 0] = -100
    loss = cross_entropy(model, (x, target))
    assert float(loss.weight) == 31
    torch.testing.assert_close(loss.total / 31, F.cross_entropy(model(x), target))
    assert int(loss.metrics["accuracy"]) == int((model(x).argmax(1) == target).sum())
    target[1, 2, 3] = 7
    with pytest.raises(DataError, match=r"label 7 is out of range: the model has 3 outputs") as caught:
        cross_entropy(model, (x, target))
    assert [*caught.value.sample_ids] == [1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: unet(classes=0), "classes must be"),
        (lambda: unet(classes=2, width=4, depth=2)(torch.randn(1, 3, 6, 8)), "6 x 8 pixels cannot be halved 2 times"),
    ],
    ids=["classes", "sides"],
)
def test_wrong_options_are_refused_with_a_remedy(call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        call()
    assert caught.value.remedy
