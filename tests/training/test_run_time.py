"""The time of a run by the clock: what evaluations take of it, and what is said of its end."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.checkpoint.store import read_best
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import read
from trainwright.runs.records import Evaluated


class Slow(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """64 batches of 4 samples, each of which takes a millisecond to read."""

    deterministic = True

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(1.5e-3)
        return torch.full((4,), index / 256), torch.tensor(index % 3)


def fit(until: str, *, resume: Path | None = None, quiet: bool = False, batches: int | None = None) -> Path:
    """Trains a small model, with an evaluation after each second step; returns its folder."""
    torch.manual_seed(0)
    data = (torch.randn(64, 4), torch.randint(0, 3, (64,)))
    evaluation = {"evaluation.every": "2steps", "evaluation.batch": 4, "evaluation.batches": batches}
    settings = {**evaluation, "log.doctor": False}
    loss, model = nn.CrossEntropyLoss(), nn.Linear(4, 3)
    return tw.fit(
        model, data, loss, val=Slow(), until=until, batch=8, settings=settings, resume=resume, quiet=quiet
    ).run


def evaluated(run: Path) -> list[tuple[int, int]]:
    return [(each.step, each.batches) for each in read(run / "log.jsonl").records if isinstance(each, Evaluated)]


@pytest.mark.slow
def test_evaluations_take_a_fixed_part_of_the_set_and_a_resume_takes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = fit("20steps")
    part = json.loads(RunFolder.open(run).plan.read_text())["evaluate_batches"]
    said = capsys.readouterr().out
    assert part in (1, 2, 4, 8, 16, 32) and f"evaluation  {part} of 64 batches" in said
    assert evaluated(run) == [*((step, part) for step in range(2, 21, 2)), (20, 0)]
    records = [each for each in read(run / "log.jsonl").records if isinstance(each, Evaluated)]
    assert [each.weight for each in records] == [4.0 * part] * 10 + [256.0]
    best = read_best(run / "checkpoints")
    assert best is not None and best.value == min(each.loss for each in records[:-1]) and best.batches == part
    fit("40steps", resume=run, quiet=True)  # a run of 40 steps has half the time for each evaluation
    assert evaluated(run)[11:] == [*((step, part) for step in range(22, 41, 2)), (40, 0)]


@pytest.mark.slow
def test_a_step_is_foretold_with_its_data_and_again_after_fifty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Last:
        def observe(self, result: tw.StepResult, state: tw.TrainState) -> tw.Stop | None:
            return tw.Stop("enough") if result.step == 51 else None

    monkeypatch.chdir(tmp_path)
    settings, loss, model = {"log.doctor": False}, nn.CrossEntropyLoss(), nn.Linear(4, 3)
    result = tw.fit(model, Slow(), loss, until="1000steps", batch=8, settings=settings, observers=[Last()])  # type: ignore[list-item]
    plan = json.loads(RunFolder.open(result.run).plan.read_text())
    assert plan["step_s"] > 8e-3, "each of 8 samples takes a millisecond and more to read"
    assert plan["seconds"]["training"] == pytest.approx(1000 * plan["step_s"])
    corrected = [line for line in capsys.readouterr().out.splitlines() if " predicted): ends" in line]
    assert len(corrected) == 1 and corrected[0].startswith("step     50   a step takes ")


@pytest.mark.slow
def test_what_the_recipe_asks_for_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert evaluated(fit("4steps", quiet=True, batches=10)) == [(2, 10), (4, 10)]
