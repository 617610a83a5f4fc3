"""A run folder that is renamed, replaced or unmounted while a process trains in it: nothing is saved anywhere else."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import trainwright as tw
from tests.disks import small_disk
from trainwright.checkpoint.manifest import step_of
from trainwright.checkpoint.store import checkpoints
from trainwright.runs.reader import read
from trainwright.runs.records import Ended, NotSaved, Saved

pytestmark = pytest.mark.slow


def fit(root: Path, acts: dict[int, Callable[[], object]]) -> tw.Result:
    """Trains 12 steps, saves every third, and does these acts after a step."""

    def act(result: tw.StepResult, state: tw.TrainState) -> None:
        acts.get(result.step, lambda: None)()

    settings = {"folder": str(root), "checkpoint.every": "3steps", "checkpoint.best": None, "log.doctor": False}
    torch.manual_seed(0)
    return tw.fit(
        nn.Linear(4, 1),
        (torch.randn(64, 4), torch.randn(64, 1)),
        nn.MSELoss(),
        until="12steps",
        batch=8,
        name="run",
        settings={**settings, "checkpoint.asynchronous": False, "checkpoint.keep": 9},
        observers=[act],
    )


def steps(folder: Path) -> list[int]:
    return sorted(step_of(path) or 0 for path in checkpoints(folder / "checkpoints"))


def test_a_renamed_folder_is_reported_and_no_other_one_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    result = fit(tmp_path, {4: lambda: run.rename(away)})
    assert result.exit_code == 1 and not run.exists() and steps(away) == [3]
    said = " ".join(capsys.readouterr().out.split())
    assert "step 6 is not saved" in said and f"its log is in {away}" in said and f"put it back as {run}" in said
    kinds = [type(each) for each in read(away / "log.jsonl").records if isinstance(each, Saved | NotSaved | Ended)]
    assert kinds == [Saved, NotSaved, NotSaved, NotSaved, Ended]


def test_a_folder_that_comes_back_is_saved_into(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    result = fit(tmp_path, {4: lambda: run.rename(away), 7: lambda: away.rename(run)})
    assert result.exit_code == 0 and steps(run) == [3, 9, 12]


def test_a_folder_that_another_run_has_taken_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def replace() -> None:
        shutil.rmtree(run)
        fit(tmp_path, {})

    result = fit(tmp_path, {4: replace})
    assert result.exit_code == 1 and steps(run) == [3, 6, 9, 12], "those of the other run"
    log = read(run / "log.jsonl").records
    assert not [each for each in log if isinstance(each, NotSaved)]


def test_a_deleted_folder_is_written_again_with_its_identity(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", list[str]()

    def delete() -> None:
        kept.append((run / "run-id").read_text())
        shutil.rmtree(run)

    result = fit(tmp_path, {4: delete})
    assert result.exit_code == 0 and steps(run) == [6, 9, 12] and (run / "run-id").read_text() == kept[0]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        yield disk


def test_an_unmounted_disk_is_reported_and_nothing_is_written_beneath_it(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fit(disk, {4: lambda: subprocess.run(["umount", "-l", str(disk)], check=True)})
    assert result.exit_code == 1 and list(disk.iterdir()) == []
    assert "it was renamed, replaced or unmounted" in " ".join(capsys.readouterr().out.split())


def test_two_runs_that_share_a_disk_keep_their_checkpoints(tmp_path: Path) -> None:
    """Both link their folder of checkpoints to it in mid-run, and save at different steps."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "step-00000002").mkdir()

    def link(name: str) -> Callable[[], object]:
        return lambda: (tmp_path / name / "checkpoints").symlink_to(disk)

    def run(name: str, every: int) -> tw.Result:
        settings = {"folder": str(tmp_path), "checkpoint.every": f"{every}steps", "log.doctor": False}
        return tw.fit(
            nn.Linear(4, 1),
            (torch.randn(64, 4), torch.randn(64, 1)),
            nn.MSELoss(),
            until=f"{3 * every}steps",
            name=name,
            quiet=True,
            settings={**settings, "checkpoint.keep": 1, "checkpoint.best": None},
            observers=[lambda result, state: link(name)() if result.step == 1 else None],  # type: ignore[list-item,return-value]
        )

    assert run("a", 5).exit_code == 0 and run("b", 7).exit_code == 0
    assert {path.name for path in disk.iterdir()} == {"step-00000002", "step-00000015", "step-00000021"}
    for name, every in (("a", 5), ("b", 7)):
        resumed = tw.fit(
            nn.Linear(4, 1),
            (torch.randn(64, 4), torch.randn(64, 1)),
            nn.MSELoss(),
            until=f"{3 * every + 1}steps",
            resume=tmp_path / name,
            quiet=True,
            accept=["all"],
        )
        assert resumed.step == 3 * every + 1
