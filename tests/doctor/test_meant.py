"""Techniques that once broke a law of the vital signs, of precision or of the resources: none of them is a warning."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.doctor.case import Case
from trainwright.doctor.checks.gradient.spike import spike
from trainwright.doctor.finding import Finding
from trainwright.doctor.resources.check import graphs_are_released
from trainwright.doctor.resources.names.held import graph_grows, model_copies
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined, Watched


def severities(findings: object) -> list[str]:
    return [each.found.severity for each in findings if isinstance(each, Finding)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("growth", "severity"), [(1.2, "info"), (1.01, "warning"), (1.0, "warning")])
def test_a_spike_of_a_rate_that_the_loop_raises(growth: float, severity: str) -> None:
    """A range test; the loss flies off, and stays there."""
    rates = [1e-4 * growth**n for n in range(48)]
    steps = [
        Watched(time_s=0.0, step=n + 1, loss=1.0 if n < 40 else 9.0, grad_norm=1.0, lr=rate)
        for n, rate in enumerate(rates)
    ]
    steps[40].values["spike"] = [20.0, statistics.median([1.0]), 8.0, "warn"]
    assert severities(spike.judge(Case(steps, finished=True).judged_by(spike))) == [severity]


@pytest.mark.parametrize(("rate", "severity"), [(1e-2, "info"), (0.31, "warning"), (1e2, "warning")])
def test_a_spike_of_a_rate_that_jumps_beyond_all_before(rate: float, severity: str) -> None:
    """Up to a rate that was used before, it is a restart."""
    rates = [1e-2] * 8 + [1e-4] * 32 + [rate] * 8
    steps = [
        Watched(time_s=0.0, step=n, loss=1.0 if n <= 41 else 9.0, grad_norm=1.0, lr=each)
        for n, each in enumerate(rates, 1)
    ]
    steps[41].values["spike"] = [20.0, 1.0, 8.0, "warn"]
    assert severities(spike.judge(Case(steps, finished=True).judged_by(spike))) == [severity]


@pytest.mark.parametrize(("last", "severity"), [(0.9, "info"), (9.0, "warning")])
def test_a_spike_that_the_loss_comes_back_from(last: float, severity: str) -> None:
    losses = [1.0] * 40 + [9.0] * 12 + [last] * 12
    steps = [Watched(time_s=0.0, step=n, loss=loss, grad_norm=1.0, lr=0.1) for n, loss in enumerate(losses, 1)]
    steps[40].values["spike"] = [20.0, 1.0, 8.0, "warn"]
    assert severities(spike.judge(Case(steps, finished=True).judged_by(spike))) == [severity]


def seen(experiment: str, values: dict[str, object], *steps: Watched) -> Case:
    return Case([*steps, Examined(time_s=0.0, step=64, experiment=experiment, values=strict(values))], finished=True)


@pytest.mark.parametrize(("goes_back", "is_told"), [(0, False), (1, True)])
def test_a_step_that_becomes_longer_is_no_leak(goes_back: int, is_told: bool) -> None:
    rows = [[n, 40 * n, 0, goes_back] for n in (8, 16, 32, 40, 48, 64)]
    case = seen("memory", {"nodes": rows, "with_graph": []})
    assert bool(severities(graphs_are_released(case))) == is_told
    assert bool(severities(graph_grows(case))) == is_told


@pytest.mark.parametrize(("size", "severity"), [(1 << 14, "info"), (1 << 22, "warning")])
def test_small_copies_of_a_model_may_become_more(size: int, severity: str) -> None:
    case = seen("memory", {"copies": [[16 * n, n, size] for n in range(1, 9)]})
    assert severities(model_copies(case)) == [severity]


class Binned(nn.Module):
    """Looks numbers up by their bins, and draws a level of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(9, 8, max_norm=1.0), nn.Linear(33, 4)

    def forward(self, bins: Tensor) -> Tensor:
        level = (torch.rand(len(bins)) * 8).long()
        out: Tensor = self.head(torch.cat([self.rows(bins).flatten(1), level.float()[:, None] / 8], 1))
        return out


@pytest.mark.slow
def test_bins_are_rows_of_a_table() -> None:
    """Its rows are scaled by each forward pass, which is no function of theirs then."""
    torch.manual_seed(0)
    x = 8 * torch.rand(128, 4)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] // 2).long()), batch_size=16)
    model = Binned()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with tw.watch(
        model, optimizer, loader=batches, out=None, quiet=True, laws=["precision", "gradient", "vitals"]
    ) as watch:
        for _ in range(3):
            for numbers, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(numbers.long()), y.clamp(max=3)).backward()
                optimizer.step()
    assert watch.session.failures == []
    assert [each.code for each in watch.findings() if each.severity != "info"] == []
