"""Techniques that once broke a law of the vital signs, of precision or of the resources: none of them is a warning."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trainwright.doctor.vitals.rates import rates_are_positive

import trainwright as tw
from tests.doctor.law_loops import Change, Loop, broken, found, watched
from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding
from trainwright.doctor.resources.check import graphs_are_released
from trainwright.doctor.resources.names.held import graph_grows, model_copies
from trainwright.doctor.vitals.check import scales_hold
from trainwright.doctor.vitals.facts import Drift, VitalsFacts
from trainwright.doctor.vitals.names.spikes import gradient_spike
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
    assert severities(gradient_spike(Case(steps, finished=True))) == [severity]


@pytest.mark.parametrize(("rate", "severity"), [(1e-2, "info"), (0.31, "warning"), (1e2, "warning")])
def test_a_spike_of_a_rate_that_jumps_beyond_all_before(rate: float, severity: str) -> None:
    """Up to a rate that was used before, it is a restart."""
    rates = [1e-2] * 8 + [1e-4] * 32 + [rate] * 8
    steps = [
        Watched(time_s=0.0, step=n, loss=1.0 if n <= 41 else 9.0, grad_norm=1.0, lr=each)
        for n, each in enumerate(rates, 1)
    ]
    steps[41].values["spike"] = [20.0, 1.0, 8.0, "warn"]
    assert severities(gradient_spike(Case(steps, finished=True))) == [severity]


@pytest.mark.parametrize(
    ("before", "at_0", "is_told"), [(1.0, 15, False), (1.0, 16, True), (0.4, 16, False), (0.4, 40, True)]
)
def test_updates_at_a_rate_of_0_that_no_decay_has_come_to(before: float, at_0: int, is_told: bool) -> None:
    facts = VitalsFacts(steps=200, updates=200 - at_0, at_0_since=201 - at_0, rate_before_0=before, highest_rate=1.0)
    case = seen(VitalsFacts.experiment, dict(vars(facts)))
    assert bool(severities(rates_are_positive(case))) == is_told


@pytest.mark.parametrize(("last", "severity"), [(0.9, "info"), (9.0, "warning")])
def test_a_spike_that_the_loss_comes_back_from(last: float, severity: str) -> None:
    losses = [1.0] * 40 + [9.0] * 12 + [last] * 12
    steps = [Watched(time_s=0.0, step=n, loss=loss, grad_norm=1.0, lr=0.1) for n, loss in enumerate(losses, 1)]
    steps[40].values["spike"] = [20.0, 1.0, 8.0, "warn"]
    assert severities(gradient_spike(Case(steps, finished=True))) == [severity]


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


@pytest.mark.parametrize(("last", "severity"), [(0.5, "info"), (2.0, "warning")])
def test_weights_that_grow_while_the_loss_falls(last: float, severity: str) -> None:
    steps = [Watched(time_s=0.0, step=n, loss=1.0 if n < 32 else last, grad_norm=1.0, lr=0.1) for n in range(1, 65)]
    drift = Drift(name="points", since=8, before=1e-4, now=9.0, usual=0.1, steady=True)
    facts = VitalsFacts(steps=64, updates=64, tensors=1, moved=1, drifts=(drift,))
    assert severities(scales_hold(seen("vitals", dict(vars(facts)), *steps))) == [severity]


def of_itself(loop: Loop) -> None:
    """A loss that is made for its gradient alone."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        made = F.cross_entropy(out, y)
        return made / made.detach()

    loop.loss = loss


def filled_anew(loop: Loop) -> None:
    """A storage of what was seen, of which the model is given parts."""
    loop.batch = lambda step: slice(step * 32 % 128, step * 32 % 128 + 32)  # type: ignore[assignment, return-value]
    loop.begin = lambda step: loop.x[loop.batch(step)].copy_(torch.randn(32, loop.x.shape[1]))


@pytest.mark.slow
@pytest.mark.parametrize(("change", "law"), [(of_itself, "loss_moves"), (filled_anew, "data_stay")])
def test_what_is_meant_is_no_warning(change: Change, law: str) -> None:
    watch = watched(change, steps=30)
    assert law not in broken(watch, "vitals") or found(watch, f"law.vitals.{law}").severity == "info"


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
