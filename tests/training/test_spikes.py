"""Spikes in a run of our own engine: warned of, left out, undone, or what a function of the user's decides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainwright as tw
from trainwright.checkpoint.spikes import Spike
from trainwright.errors import TrainwrightError
from trainwright.runs.reader import read
from trainwright.runs.records import Found, Skipped

pytestmark = [pytest.mark.examined, pytest.mark.slow]

BAD = 40
"""The step whose samples are a thousand times as large."""


def only_the_first(spike: Spike) -> str:
    return "skip" if spike.step == BAD else "warn"


class Weights:
    """An observer: the weights after each step."""

    def __init__(self) -> None:
        self.after: dict[int, Tensor] = {}

    def observe(self, result: tw.StepResult, state: tw.TrainState) -> None:
        self.after[result.step] = next(state.model.parameters()).detach().clone()

    def close(self) -> None: ...


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * 64, 4, generator=generator)
    y = (x.sum(1) > 0).long()
    x[8 * (BAD - 1) : 8 * BAD] *= -1000.0  # and so far on the wrong side
    return TensorDataset(x, y)


def fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, policy: str, until: str = "60steps", **more: object
) -> tuple[tw.Result, Weights]:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    weights = Weights()
    settings = {"spikes.policy": policy, "data.shuffle": False, "optimizer.clip.by": "none", "schedule.use": "constant"}
    result = tw.fit(
        nn.Linear(4, 2),
        data(),
        nn.CrossEntropyLoss(),
        until=until,
        batch=8,
        lr=0.01,
        optimizer="sgd",
        quiet=True,
        settings=settings,
        observers=[weights],
        **more,
    )
    return result, weights


def records(result: tw.Result, kind: type) -> list:  # type: ignore[type-arg]
    return [each for each in read(result.run / "log.jsonl").records if isinstance(each, kind)]


def spikes(result: tw.Result) -> list[tuple[str, int]]:
    return [(each.severity, each.step) for each in records(result, Found) if each.code == "gradient.spike"]


def test_it_is_warned_of_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, weights = fit(tmp_path, monkeypatch, "warn")
    assert not torch.equal(weights.after[BAD], weights.after[BAD - 1])
    assert spikes(result) == [("warning", BAD)] and records(result, Skipped) == []


def test_it_is_left_out_and_named_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, weights = fit(tmp_path, monkeypatch, "skip")
    assert torch.equal(weights.after[BAD], weights.after[BAD - 1])
    assert not torch.equal(weights.after[BAD + 1], weights.after[BAD])
    (skipped,) = records(result, Skipped)
    assert skipped.step == BAD and skipped.reason.startswith("spike")
    assert sorted(skipped.sample_ids) == list(range(8 * (BAD - 1), 8 * BAD))
    assert result.skipped == 1 and spikes(result) == [("warning", BAD)]


def test_a_rollback_undoes_the_steps_since_a_kept_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, weights = fit(tmp_path, monkeypatch, "rollback")
    undone = [each.step for each in records(result, Skipped)]
    back_to = undone[0] - 1
    assert sorted(undone) == list(range(back_to + 1, BAD + 1)) and back_to in (16, 32)
    assert torch.equal(weights.after[BAD], weights.after[back_to])
    assert {each.reason for each in records(result, Skipped)} == {
        f"spike in step {BAD}: back to the state after step {back_to}"
    }
    assert result.step == 60 and spikes(result) == [("warning", BAD)]


def test_a_function_of_the_users_own_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, weights = fit(tmp_path, monkeypatch, f"{__name__}:only_the_first")
    assert torch.equal(weights.after[BAD], weights.after[BAD - 1])
    assert [each.step for each in records(result, Skipped)] == [BAD]


def test_off_looks_at_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, weights = fit(tmp_path, monkeypatch, "off")
    assert not torch.equal(weights.after[BAD], weights.after[BAD - 1]) and spikes(result) == []


def test_a_policy_that_there_is_not_is_named_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainwrightError, match="skipp"):
        fit(tmp_path, monkeypatch, "skipp")


@pytest.mark.slow
def test_a_resumed_run_decides_as_one_that_was_never_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics are part of the state; without them the first 16 steps after a resume would find no spike."""
    _, straight = fit(tmp_path / "straight", monkeypatch, "skip")
    first, _ = fit(tmp_path / "halves", monkeypatch, "skip", until="36steps")
    _, weights = fit(tmp_path / "halves", monkeypatch, "skip", resume=first.run, accept="all")
    assert torch.equal(weights.after[60], straight.after[60])
    assert torch.equal(weights.after[BAD], weights.after[BAD - 1])


def test_a_rollback_after_a_resume_says_that_it_goes_back_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = fit(tmp_path, monkeypatch, "rollback", until="36steps")
    result, _ = fit(tmp_path, monkeypatch, "rollback", resume=first.run, accept="all")
    undone = {each.step: each.reason for each in records(result, Skipped)}
    reason = (
        f"spike in step {BAD}: back to the state after step 36, where this process began: it holds no earlier state"
    )
    assert undone == dict.fromkeys(range(37, BAD + 1), reason)
