"""Tests of loss.variance_as_deviation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.doctor.checks.loops import alarms, watched

pytestmark = pytest.mark.slow
CODE = "loss.variance_as_deviation"


class Autoencoder(nn.Module):
    def __init__(self, deviation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.decoder, self.deviation = nn.Linear(8, 16), nn.Linear(8, 8), deviation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, a = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * self.deviation(a)), mean, a


def of_variance(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    made, mean, a = model(x)
    divergence = -0.5 * (1 + a - mean.pow(2) - a.exp()).sum(1).mean()
    return (made - x).square().sum(1).mean() + divergence


def of_deviation(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    made, mean, a = model(x)
    divergence = (0.5 * (mean.pow(2) + (2 * a).exp() - 1) - a).sum(1).mean()
    return (made - x).square().sum(1).mean() + divergence


@pytest.mark.parametrize(
    ("deviation", "loss", "found"),
    [
        (torch.exp, of_variance, True),
        (lambda a: (0.5 * a).exp(), of_variance, False),
        (torch.exp, of_deviation, False),
    ],
    ids=["variance as deviation", "root of the variance", "logarithm of the deviation"],
)
def test_the_noise_of_an_autoencoder(
    deviation: Callable[[Tensor], Tensor], loss: Callable[[nn.Module, Tensor, Tensor], Tensor], found: bool
) -> None:
    assert (CODE in alarms(watched(Autoencoder(deviation), loss=loss))) == found


def shared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One call of exp for both."""
    mean, a = model(x).chunk(2, 1)
    spread = a.exp()
    sampled = mean + spread * torch.randn_like(mean)
    return (sampled - x[:, :2]).square().mean() + 0.5 * (spread + mean.square() - 1 - a).mean()


def coupled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A flow scales data by exp(a), and its loss has a without exp."""
    mean, a = model(x).chunk(2, 1)
    return 0.5 * (x[:, :2] * a.exp() + mean).square().sum(1).mean() - a.sum(1).mean()


@pytest.mark.parametrize(("loss", "found"), [(shared, True), (coupled, False)])
def test_in_the_loop(loss: Callable[[nn.Module, Tensor, Tensor], Tensor], found: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    assert (CODE in alarms(watched(model, loss=loss))) == found
