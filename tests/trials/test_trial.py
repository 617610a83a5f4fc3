"""Trials: real processes, their run folders, and their ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests import forked
from trainwright.errors import UsageError
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import is_locked
from trainwright.trials import TrialProcess, read_trial, run_trial

pytestmark = [pytest.mark.process, pytest.mark.slow]

DATA = """
import torch

def points(size):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(size))
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
"""
RECIPE = """
until: 8steps
device: cpu
model: {use: mlp, args: {sizes: [8, 8, 2]}}
data: {train: {use: "points:points", args: {size: 64}}, val: {use: "points:points", args: {size: 32}}}
batch: {size: 8}
optimizer: {use: sgd, lr: 0.1}
evaluation: {every: 4steps}
log: {every: 1steps, doctor: false}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "points.py").write_text(DATA)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_a_trial_is_a_run_folder_that_is_read_once_it_is_over(recipe: Path) -> None:
    folder = recipe.parent / "trials" / "a"
    trial = run_trial(recipe, ["optimizer.lr=0.5"], folder)
    assert (trial.ended, trial.steps, trial.settings) == ("finished", 8, ("optimizer.lr=0.5",))
    assert [step for step, _ in trial.losses] == [*range(1, 9)]
    assert [each.step for each in trial.evaluations] == [4, 8]
    assert len(trial.step_seconds) == 8
    assert min(trial.peak_bytes, trial.seconds, trial.step_s, trial.val_loss) > 0
    assert RunFolder.open(folder).recipe.is_file()
    started = folder.joinpath("log.jsonl").stat().st_mtime_ns
    assert run_trial(recipe, ["optimizer.lr=0.5"], folder) == trial
    assert folder.joinpath("log.jsonl").stat().st_mtime_ns == started


@pytest.mark.usefixtures("forked_trials")
def test_a_recipe_that_is_refused_is_a_failed_trial_with_the_reason(recipe: Path) -> None:
    trial = run_trial(recipe, ["optimizer.lrr=1"], recipe.parent / "a")
    assert trial.ended == "failed"
    assert "did you mean optimizer.lr?" in trial.reason


def test_a_trial_that_is_killed_after_it_was_asked_to_stop_can_be_resumed(recipe: Path) -> None:
    process = TrialProcess(recipe, ["until=1000000steps"], recipe.parent / "a")
    while not (read_trial(process.folder).losses):
        time.sleep(0.05)
    pid = process._process.pid
    os.kill(pid, signal.SIGSTOP)  # it cannot save
    process.request_stop()
    process.kill()
    process.wait()
    trial = process.read()
    assert (trial.ended, trial.is_over) == ("stopped", False)


@pytest.mark.usefixtures("forked_trials")
def test_a_trial_that_is_stopped_by_its_limit_is_resumed_with_the_same_losses(recipe: Path) -> None:
    settings = ["until=60steps", "checkpoint.every=null"]
    undisturbed = run_trial(recipe, settings, recipe.parent / "undisturbed")
    folder = recipe.parent / "stopped"
    process = TrialProcess(recipe, settings, folder)
    while process.poll() is None and not read_trial(folder).losses:
        time.sleep(0.005)
    process.request_stop()
    process.wait()
    assert process.read().ended in ("stopped", "finished")
    resumed = run_trial(recipe, settings, folder)
    assert (resumed.ended, resumed.losses) == ("finished", undisturbed.losses)
    assert resumed.settings == tuple(settings)


def test_a_trial_ends_when_the_process_that_started_it_is_killed(recipe: Path) -> None:
    folder = recipe.parent / "a"
    code = (
        "import sys; from pathlib import Path; from tests import forked; from trainwright.trials import run_trial\n"
        "forked.fork_trials()\n"
        "run_trial(Path(sys.argv[1]), ['until=1000000steps'], Path(sys.argv[2]))"
    )
    parent = forked.Forked(code, str(recipe), str(folder))
    while parent.poll() is None and not read_trial(folder).losses:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    end_s = time.monotonic() + 60
    while is_locked(folder) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert read_trial(folder).ended == "stopped"


def test_a_folder_that_holds_something_else_is_not_removed(recipe: Path) -> None:
    folder = recipe.parent / "a"
    (folder / "checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match="not a run that can be resumed"):
        run_trial(recipe, [], folder)
    assert (folder / "checkpoints").is_dir()


@pytest.mark.usefixtures("forked_trials")
def test_what_a_kill_left_of_a_run_that_had_not_begun_is_begun_again(recipe: Path) -> None:
    folder = recipe.parent / "a"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("torn")
    assert run_trial(recipe, [], folder).ended == "finished"
