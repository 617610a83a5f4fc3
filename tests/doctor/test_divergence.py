"""The divergence of a sample that a model draws: of usual forms it holds, and mistakes in the formula break it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import trainwright as tw
from tests.doctor.losses import JUDGES, X
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding
from trainwright.doctor.law import Holds, NotApplicable

Deviation = Callable[[Tensor], Tensor]
Divergence = Callable[[Tensor, Tensor], Tensor]


class Coder(nn.Module):
    """Draws a code of two numbers, and says what it was drawn with."""

    def __init__(self, deviation: Deviation) -> None:
        super().__init__()
        self.into, self.out, self.deviation = nn.Linear(6, 4), nn.Linear(2, 6), deviation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.into(x).chunk(2, 1)
        return self.out(mean + self.deviation(log) * torch.randn_like(mean)), mean, log


def usual(mean: Tensor, log_var: Tensor) -> Tensor:
    return -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()


def from_wide(mean: Tensor, log: Tensor) -> Tensor:
    return kl_divergence(Normal(mean, F.softplus(log)), Normal(0.5, 2.0)).sum(1).mean()


def half(log_var: Tensor) -> Tensor:
    return (log_var / 2).exp()


@pytest.mark.slow
@each_row(
    ("deviation", "divergence", "kind"),
    [
        (half, usual, Holds),
        (half, lambda mean, log: 0.1 * usual(mean, log), Holds),
        (F.softplus, from_wide, Holds),
        (torch.exp, lambda mean, log: (mean.square() / 2 + (2 * log).exp() / 2 - log).sum(), Holds),
        (half, lambda mean, log: usual(mean, log).clamp(min=0.5), NotApplicable),
        (half, lambda mean, log: mean.square().mean(), NotApplicable),
        (torch.exp, usual, Finding),
        (half, lambda mean, log: usual(mean, log) + mean.square().mean(), Holds),
        (half, lambda mean, log: -0.5 * (10 * (1 + log - mean.square()) - log.exp()).mean(), Finding),
        (half, lambda mean, log: -0.5 * (1 + log - mean.square() - mean.exp()).mean(), Finding),
        (lambda log: half(log.detach()), usual, Finding),
    ],
    ids=str,
)
def test_a_divergence_is_of_the_sample(deviation: Deviation, divergence: Divergence, kind: type) -> None:
    torch.manual_seed(0)
    model = Coder(deviation)
    optimizer = torch.optim.Adam(model.parameters())
    with tw.watch(model, optimizer, out=None, quiet=True, laws=["loss.divergence_is_of_the_sample"]) as watch:
        rebuilt, mean, log = model(X[:16])
        (F.mse_loss(rebuilt, X[:16]) + divergence(mean, log)).backward()
        optimizer.step()
    assert watch.session.failures == []
    [verdict] = JUDGES["divergence_is_of_the_sample"](Case(watch.records))
    assert isinstance(verdict, kind), verdict
