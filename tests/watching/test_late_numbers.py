"""What is done on a GPU so that the host never waits, here on a CPU: numbers read late, an optimizer that vetoes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.doctor.measure.memory import Memory
from trainwright.recorder.veto import Veto
from trainwright.runs.records import Watched
from trainwright.watching import session
from trainwright.watching.watch import Watch


def train(steps: int, bad: dict[int, float], **how: object) -> tuple[list[Tensor], Watch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    weights = []
    with tw.watch(model, optimizer, out=None, quiet=True, **how) as watch:
        for step in range(1, steps + 1):
            x, y = torch.randn(8, 4), torch.randint(3, (8,))
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * bad.get(step, 1.0)).backward()
            optimizer.step()
            weights.append(torch.cat([p.detach().flatten() for p in (*model.parameters(), *model.buffers())]))
    return weights, watch


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "lateness", lambda device: 2)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Veto, "_takes_it_on_device", lambda self, norm, optimizer: True)


def told(watch: Watch) -> list[tuple[int, float, float]]:
    return [(r.step, r.loss, r.grad_norm) for r in watch.records if isinstance(r, Watched)]


@pytest.mark.slow
def test_late_numbers_are_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    _, watch = train(12, {})
    monkeypatch.setattr(session, "lateness", lambda device: 2)
    _, later = train(12, {})
    assert told(watch) == told(later) and [step for step, *_ in told(later)] == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.usefixtures("late")
def test_a_fault_is_named_with_its_own_step_two_steps_later() -> None:
    weights, watch = train(12, {7: math.nan})
    assert torch.equal(weights[6], weights[5])
    first = watch.findings()[0]
    assert first.severity == "critical" and first.step == 7, first


@pytest.mark.usefixtures("late", "on_device")
def test_a_veto_on_the_device_leaves_weights_moments_and_statistics() -> None:
    weights, watch = train(12, {7: math.nan})
    assert torch.equal(weights[6], weights[5]) and not torch.equal(weights[7], weights[6])
    assert watch.session.num_vetoed == 1
    assert watch.findings()[0].step == 7
    steps = {int(state["step"]) for state in watch.session.recording.optimizers[0].state.values()}
    assert steps == {11}


@pytest.mark.slow
def test_a_mistake_of_ours_does_not_end_a_run_of_our_own_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong(self: Memory) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Memory, "values", wrong)
    x = torch.randn(64, 4)
    result = tw.fit(nn.Linear(4, 2), (x, (x.sum(1) > 0).long()), nn.CrossEntropyLoss(), until="12steps")
    assert result.ending == "finished" and result.step == 12
    assert any("a mistake of ours" in line for line in (result.run / "log.jsonl").read_text().splitlines())


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_reported_when_it_ends() -> None:
    """Its update is left out."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for step in range(1, 81):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,)))
            (loss * (math.nan if step == 77 else 1.0)).backward()
            before = model.weight.detach().clone()
            optimizer.step()
            if step == 77:
                assert torch.equal(model.weight, before)
                assert [found.step for found in watch.findings() if found.severity == "critical"] == [77]
        budget, all_s = watch.session.budget, watch.session.wall_s
        trained_s, spent_s = budget.trained_s, budget.spent_s  # before the examination at the end
    assert [step for step, *_ in told(watch)][:64] == list(range(1, 65))  # each of them has its record
    assert 0 < trained_s < all_s - spent_s
