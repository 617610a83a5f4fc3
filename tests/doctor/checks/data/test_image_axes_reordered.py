"""Images whose axes are exchanged by a reshape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.data.loops import exam, is_not_applicable, said
from trainwright.doctor.checks.data.image_axes_reordered import image_axes_reordered
from trainwright.doctor.facts.data import BatchFacts, InputSpread

SPREAD = (InputSpread(shape=(16, 3, 16, 16), constant=False),)


def test_every_batch_must_show_it() -> None:
    whole, scrambled = (BatchFacts(inputs=SPREAD, scrambled=each) for each in ("", "(height, width, channel)"))
    assert said(image_axes_reordered, exam(1, scrambled), exam(2, scrambled)) == ["warning"]
    assert not said(image_axes_reordered, exam(1, scrambled), exam(2, whole))
    assert is_not_applicable(image_axes_reordered, exam(1, BatchFacts()))


def pictures(number: int) -> Tensor:
    """Smooth pictures with noise, (number, height, width, channel)."""
    coarse = torch.randn(number, 3, 4, 4)
    return (F.interpolate(coarse, scale_factor=4.0, mode="bilinear") + 0.3 * torch.randn(number, 3, 16, 16)).permute(
        0, 2, 3, 1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda x: x.reshape(-1, 3, 16, 16), True),
        (lambda x: x.permute(0, 3, 1, 2).reshape(-1, 16, 16, 3).permute(0, 3, 1, 2), True),
        (lambda x: x.permute(0, 3, 1, 2), False),
        (lambda x: torch.randn(len(x), 3, 16, 16), False),
        (lambda x: x.permute(0, 3, 1, 2)[:, :, torch.randperm(16)], False),
    ],
    ids=["reshaped", "reshaped back", "permuted", "noise", "rows in another order"],
)
def test_pictures(prepare: Callable[[Tensor], Tensor], expected: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, 3, 16, 16))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all", checks=["data"]) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(prepare(pictures(24))), torch.randint(2, (24,))).backward()
            optimizer.step()
    assert ("data.image_axes_reordered" in {each.code for each in watch.findings()}) is expected
