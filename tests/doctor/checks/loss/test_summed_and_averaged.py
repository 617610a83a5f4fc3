"""Terms of one loss that are reduced in two ways, one of which is not learned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.loops import made_of
from trainwright.doctor.discovery import check_of
from trainwright.doctor.facts.loss import LossFacts, LossSign, MeasuredLoss
from trainwright.runs.records import Examined, Watched

KNOWS_NOTHING, KNOWS = ((0.5, 0.5, 0.5),) * 6, ((0.1, 0.5, 0.9),) * 6


@pytest.mark.parametrize(
    ("signs", "rows", "steps", "found"),
    [(4, KNOWS_NOTHING, 64, 1), (4, KNOWS, 64, 0), (1, KNOWS_NOTHING, 64, 0), (4, KNOWS_NOTHING, 32, 0)],
)
def test_only_a_term_that_is_not_learned(
    signs: int, rows: tuple[tuple[float, float, float], ...], steps: int, found: int
) -> None:
    check = check_of("loss.summed_and_averaged")
    assert check is not None
    sign = LossSign("summed_and_averaged", "mse_loss", signs, "train.py:7")
    facts = LossFacts(given=(MeasuredLoss("mse_loss", rows=rows),), signs=(sign,), steps=8)
    seen = [Watched(time_s=0.0, step=n, loss=1.0, grad_norm=1.0, lr=1e-3) for n in range(1, steps + 1)]
    assert len(made_of(check, (steps, facts), steps=seen)) == found


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 4), nn.Linear(2, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


@pytest.mark.slow
@pytest.mark.parametrize(("divisor", "found"), [(1, True), (16, False)], ids=["summed", "averaged"])
def test_a_variational_autoencoder(divisor: int, found: bool) -> None:
    torch.manual_seed(0)
    model = Coder()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(6):
            x = torch.randn(16, 12)
            again, mean, log_variance = model(x)
            divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum() / divisor
            optimizer.zero_grad()
            (F.mse_loss(again, x) + divergence).backward()
            optimizer.step()
    assert watch.session.failures == []
    outcomes = [each.values for each in watch.records if isinstance(each, Examined) and each.experiment == "loss"]
    assert outcomes
    assert any(sign["kind"] == "summed_and_averaged" for each in outcomes for sign in each["signs"]) == found
