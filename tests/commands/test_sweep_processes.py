"""Sweeps with their processes: kills, pruning, budgets, and what they leave in their folder."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw
from benchmarks.sweep import command, prepare, table
from tests import forked
from tests.training.processes import wait_for_step
from trainwright.commands.sweep import SweepResult, read_sweep, run_sweep
from trainwright.commands.sweep.control import ValueReader
from trainwright.commands.sweep.spec import SPEC, SweepBudget
from trainwright.commands.sweep.study import StudyTrials, TrialRow, quiet_optuna, trial_folder
from trainwright.errors import MissingExtra, UsageError
from trainwright.recipe import from_mapping
from trainwright.recipe.yaml_core import read
from trainwright.runs.folder import runs_in
from trainwright.trials import read_trial

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.usefixtures("forked_trials")]

RANDOM = ("--sampler", "random")
POINTS = """
import time
from pathlib import Path
import torch

class Points(torch.utils.data.TensorDataset):
    # while there is a file "hold", waits in the 13th step: after a checkpoint and two evaluations
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        while self.reads > 100 and Path(__file__).with_name("hold").exists():
            time.sleep(0.01)
        return super().__getitem__(index)

def points(size):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(size))
    return Points(x, (x.sum(1) > 0).long())
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = prepare(tmp_path_factory.mktemp("sweep"))
    recipe.with_name("points.py").write_text(POINTS)
    return recipe


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, forked_trials: None) -> SweepResult:
    over = {"optimizer.lr": "log:1e-3..1", "seed": "0..100"}
    return tw.sweep(
        recipe, over, trials=2, sampler="random", jobs=2, name="undisturbed", folder=recipe.parent, quiet=True
    )


def test_a_trial_is_a_run_that_other_verbs_read(undisturbed: SweepResult) -> None:
    assert [row.ended for row in undisturbed.rows] == ["finished"] * 2
    assert [run.name for run in runs_in(undisturbed.folder / "trials")] == ["trial-000", "trial-001"]
    best = undisturbed.best
    assert best is not None
    trial = read_trial(undisturbed.folder / best.folder)
    assert (trial.val_loss, trial.steps) == (best.value, best.steps)
    assert f"optimizer.lr={json.dumps(best.params['optimizer.lr'])}" in trial.settings


def test_the_best_recipe_trains_to_the_best_value(undisturbed: SweepResult, tmp_path: Path) -> None:
    assert undisturbed.best is not None and undisturbed.best_recipe is not None
    written: Any = read(undisturbed.best_recipe.read_text(), "best.yaml").value
    best = from_mapping(written)
    assert best.recipe.optimizer.lr == undisturbed.best.params["optimizer.lr"]
    words = shlex.split(undisturbed.train_best)[1:]  # the modules of the recipe are found from any folder
    done = forked.run(forked.COMMAND_LINE, *words, "--set", f"folder={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_trial(tmp_path / "undisturbed-best").val_loss == undisturbed.best.value


def test_the_page_needs_nothing_else(undisturbed: SweepResult) -> None:
    page = (undisturbed.folder / "sweep.html").read_text()
    assert "Parallel coordinates" in page
    assert "trials/trial-000/report.html" in page
    assert "optimizer:" in page  # the best recipe
    assert 'src="http' not in page and 'href="http' not in page


def test_a_sweep_that_is_killed_has_the_table_of_one_that_is_not(undisturbed: SweepResult, recipe: Path) -> None:
    arguments = command(recipe, "killed", 2, *RANDOM, "--jobs", "2")[3:]
    hold = recipe.with_name("hold")
    hold.touch()
    first = forked.Forked(forked.FORKING_TRIALS, *arguments)
    wait_for_step(recipe.parent / "killed" / "trials" / "trial-000" / "log.jsonl", 10)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    hold.unlink()
    again = forked.run(forked.FORKING_TRIALS, *arguments)
    assert again.returncode == 0, again.stderr
    assert table(recipe.parent / "killed") == table(undisturbed.folder)


def test_a_sweep_that_is_over_trains_nothing_again(undisturbed: SweepResult, recipe: Path) -> None:
    log = undisturbed.folder / "trials" / "trial-000" / "log.jsonl"
    before = log.stat().st_mtime_ns
    again = run_sweep(read_sweep(undisturbed.folder, environ={}), say=lambda line: None)
    assert again.rows == undisturbed.rows
    assert log.stat().st_mtime_ns == before


def test_a_bad_trial_is_stopped_early_and_counts_with_its_value_there(recipe: Path) -> None:
    over = {"optimizer.lr": "log:1e-3..1"}
    sweep = read_sweep(
        recipe,
        over=over,
        settings=["until=100000steps", "evaluation.every=50steps", "checkpoint.every=null"],
        environ={},
        pruner="median",
        trials=6,
        jobs=1,
        name="pruned",
        folder=str(recipe.parent),
    )
    sweep.folder.mkdir()
    (sweep.folder / SPEC).write_text(sweep.to_yaml())
    with quiet_optuna():
        trials = StudyTrials(sweep)
        for _ in range(5):  # five better trials
            trial = trials.ask()
            trials.report(trial, 50, 1e-9)
            trials.finish(trial, TrialRow(trial.number, trial.params, 1e-9, 100_000, 1.0, "finished"))
    result = run_sweep(sweep, say=lambda line: None)
    pruned = result.rows[-1]
    assert (pruned.trial, pruned.ended, pruned.steps) == (5, "pruned", 50)
    run = read_trial(trial_folder(sweep, 5))
    assert run.evaluations[0].loss == pruned.value
    assert run.ended == "stopped" and run.steps < 100_000


def test_the_end_of_the_budget_stops_trials_and_they_go_on_with_the_next_call(recipe: Path) -> None:
    arguments = {"over": {"seed": [1]}, "settings": ["until=300steps"], "environ": {}, "jobs": 1, "name": "budget"}
    first = read_sweep(recipe, folder=str(recipe.parent), budget="0.5s", **arguments)  # type: ignore[arg-type]
    result = run_sweep(first, say=lambda line: None)
    assert [row.ended for row in result.rows] == ["stopped"]
    assert "is spent" in result.why_ended and result.exit_code == 1
    later = run_sweep(read_sweep(first.folder, environ={}), say=lambda line: None)
    assert [(row.ended, row.steps) for row in later.rows] == [("finished", 300)]


def test_two_processes_do_not_run_one_sweep(recipe: Path) -> None:
    arguments = command(recipe, "twice", 2, *RANDOM, "--jobs", "1", "--set", "until=1000000steps")[3:]
    first = forked.Forked(forked.FORKING_TRIALS, *arguments)
    try:
        lock, end_s = recipe.parent / "twice" / "sweep.lock", time.monotonic() + 60
        while not (lock.is_file() and lock.stat().st_size) and time.monotonic() < end_s:
            time.sleep(0.05)
        done = forked.run(forked.COMMAND_LINE, *arguments)
        assert done.returncode == 2
        assert f"another process runs this sweep: process {first.pid}" in done.stderr
    finally:
        first.send_signal(signal.SIGTERM)
    assert first.wait() == 75


def test_a_budget_in_usd_counts_the_time_of_earlier_processes(undisturbed: SweepResult) -> None:
    used_s = sum(row.seconds for row in undisturbed.rows)
    sweep = replace(read_sweep(undisturbed.folder, environ={}), budget=SweepBudget(usd=used_s / 4), usd_per_hour=3600.0)
    result = run_sweep(sweep, say=lambda line: None)
    assert "USD is spent" in result.why_ended


def test_trials_that_all_fail_end_the_sweep_with_the_reason(recipe: Path) -> None:
    over = {"model.args.activation": ["rely", "relo", "relp", "relq"]}
    result = tw.sweep(recipe, over, jobs=1, name="failing", folder=recipe.parent, quiet=True)
    assert result.exit_code == 1
    assert "activation must be one of" in result.why_ended
    assert [row.ended for row in result.rows] == ["failed"] * 3


def test_a_metric_that_is_not_measured_is_named(undisturbed: SweepResult) -> None:
    log = undisturbed.folder / "trials" / "trial-000" / "log.jsonl"
    with pytest.raises(UsageError, match="the validation has no metric 'f2'"):
        ValueReader(log, "f2").read()


def test_a_sweep_in_a_thread_takes_no_signals(undisturbed: SweepResult) -> None:
    found: list[SweepResult] = []
    sweep = read_sweep(undisturbed.folder, environ={})
    thread = threading.Thread(target=lambda: found.append(run_sweep(sweep, say=lambda line: None)))
    thread.start()
    thread.join()
    assert found[0].rows == undisturbed.rows


def test_without_optuna_the_remedy_is_its_package(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r'pip install "optuna>=5\.0"'):
        tw.sweep(recipe, {"seed": [1]}, folder=recipe.parent, name="without")
