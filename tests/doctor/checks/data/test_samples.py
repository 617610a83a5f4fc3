"""Checks of samples that come again: changed in place by columns, and image and mask flipped apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from tests.doctor.checks.data.loops import table, trained, warned
from trainwright.doctor.measure.samples import _factor, _flip

X, Y = table(64)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda x, n: x / torch.linspace(2, 4, 6), 1 / 3),
        (lambda x, n: 0.5 * x - 1, 0.5),
        (lambda x, n: x + 1, 1.0),
        (lambda x, n: x * (1 + 0.1 * n), None),
        (lambda x, n: x + 0.1 * torch.randn(6, generator=torch.Generator().manual_seed(n)), None),
        (lambda x, n: x * (1 + 1e-7), None),
    ],
    ids=["each column", "all alike", "shifted", "brightness at random", "noise", "rounding"],
)
def test_a_function_of_all_samples(change, factor: float | None) -> None:  # type: ignore[no-untyped-def]
    pairs = [(X[n].double(), change(X[n].double(), n)) for n in range(8)]
    found = _factor(pairs)
    assert found == (factor and pytest.approx(factor, rel=0.2))
    assert _factor(pairs[:2]) is None


def test_the_flip_of_a_picture() -> None:
    picture = torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(0))
    turned = [_flip(picture, each) for each in (picture, picture.flip(-1), 2 * picture.rot90(1, (-2, -1)) + 1)]
    assert turned == [0, 4, 1]
    assert _flip(picture, torch.randn(1, 6, 6)) is None
    assert _flip(torch.eye(6)[None], torch.eye(6)[None]) is None, "symmetric"


class Scans(Dataset[tuple[Tensor, Tensor]]):
    """Pictures and their masks, flipped together or apart."""

    def __init__(self, *, apart: bool) -> None:
        self.x, self.apart = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(0)), apart

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        first, second = torch.rand(2) < 0.5
        mask = (x > 0).float()
        return x.flip(-1) if first else x, mask.flip(-1) if (second if self.apart else first) else mask


@pytest.mark.slow
@pytest.mark.parametrize(
    ("apart", "two_views", "found"),
    [(True, False, ["data.flipped_apart"]), (False, False, []), (True, True, [])],
    ids=["apart", "together", "two views for one model"],
)
def test_pictures_and_masks(apart: bool, two_views: bool, found: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(1, 1, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    loader = DataLoader(Scans(apart=apart), batch_size=6, shuffle=True)
    with tw.watch(model, optimizer, out=None, quiet=True, checks=["data"]) as watch:
        for _ in range(5):
            for x, mask in loader:
                optimizer.zero_grad()
                if two_views:
                    loss = F.mse_loss(model(x), model(mask))
                else:
                    loss = F.binary_cross_entropy_with_logits(model(x), mask)
                loss.backward()
                optimizer.step()
    assert watch.session.failures == []
    assert [each for each in warned(watch) if each == "data.flipped_apart"] == found


@pytest.mark.slow
def test_noise_at_random_changes_nothing() -> None:
    class Noisy(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return len(X)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return X[index] * (1 + torch.rand(())), Y[index]

    loader = DataLoader(Noisy(), batch_size=16, shuffle=True)
    assert warned(trained(batch for _ in range(4) for batch in loader)) == []
