"""Sweeps without processes: what is requested, how it is checked, and what Optuna decides after a kill."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sweep import prepare
from trainwright.commands.sweep import Sweep, SweepResult, is_sweep_file, over_of, read_sweep
from trainwright.commands.sweep.result import ranked
from trainwright.commands.sweep.spec import SweepBudget, differences, parse_dimension, spec_of
from trainwright.commands.sweep.study import JOURNAL, StudyTrials, TrialRow, quiet_optuna
from trainwright.errors import RecipeError, UsageError

ROOT = Path(__file__).parents[2]
LR = {"optimizer.lr": "log:1e-3..1"}


def made(folder: Path, over: Mapping[str, object] = LR, **options: Any) -> Sweep:
    return read_sweep(prepare(folder), over=over, environ={}, folder=str(folder), **options)


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("[a, b]", ("a", "b")),
        ("1.0e-3,3.0e-3", (1e-3, 3e-3)),
        ("{16, 32}", (16, 32)),
        ({"a": None, "b": None}, ("a", "b")),
        ([[8, 2], [8, 8, 2]], ([8, 2], [8, 8, 2])),
        ("log:1e-4..1e-1:4", (1e-4, 1e-3, 1e-2, 1e-1)),
        ("0.0..0.5:3", (0.0, 0.25, 0.5)),
        ("int:1..9:3", (1, 5, 9)),
    ],
    ids=str,
)
def test_choices(written: object, values: tuple[object, ...]) -> None:
    assert parse_dimension("p", written, lambda number: False).choices == values


@pytest.mark.parametrize(
    ("written", "is_whole", "expected"),
    [
        ("1e-4..1e-1", False, (1e-4, 0.1, False, False)),
        ("log:1e-4..1e-1", False, (1e-4, 0.1, True, False)),
        ("0..4", True, (0, 4, False, True)),
        ("0..4", False, (0, 4, False, False)),
        ("int:2..8", False, (2, 8, False, True)),
        ("log:int:16..256", False, (16, 256, True, True)),
        ("-1..1", False, (-1, 1, False, False)),
    ],
)
def test_ranges(written: str, is_whole: bool, expected: tuple[float, float, bool, bool]) -> None:
    found = parse_dimension("p", written, lambda number: is_whole)
    assert (found.low, found.high, found.is_log, found.is_int) == expected


@pytest.mark.parametrize("written", ["1..0", "1..1", "log:0..1", "a..b", "int:0.5..2", "word", 3, [], [1, 1], "1..2:1"])
def test_what_is_no_space_names_its_remedy(written: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse_dimension("p", written, lambda number: False)
    assert caught.value.remedy


def test_a_seed_takes_whole_numbers_because_the_schema_does(tmp_path: Path) -> None:
    seed, momentum = made(tmp_path, {"seed": "0..4", "optimizer.args.momentum": "0..1"}).space
    assert (seed.grid, momentum.is_int) == ((0, 1, 2, 3, 4), False)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    over = {
        "optimizer.lrr": "log:1e-3..1",
        "batch.size": "0..8",
        "optimizer.weight_decay": "1..0",
        "precision": ["fp32", "fp12"],
        "folder": ["a"],
        "until": "10steps..20steps",
    }
    with pytest.raises(RecipeError) as caught:
        made(tmp_path, over, metric="reward", budget="3x")
    found = {each.path: each for each in caught.value.problems}
    assert {*over, "metric", "budget"} <= set(found)
    assert "did you mean optimizer.lr?" in found["optimizer.lrr"].remedy
    assert "empty range" in found["optimizer.weight_decay"].rule
    assert all(each.remedy for each in found.values())


def test_the_mode_of_a_built_in_metric_is_known(tmp_path: Path) -> None:
    assert made(tmp_path, metric="accuracy").mode == "max"


def test_a_grid_reports_combinations_that_the_schema_refuses(tmp_path: Path) -> None:
    over = {"until": ["10steps", "20steps"], "schedule.warmup": ["5steps", "15steps"]}
    with pytest.raises(RecipeError, match=r"trial with until=\"10steps\", schedule.warmup=\"15steps\""):
        made(tmp_path, over)


def test_a_grid_of_a_range_of_floats_names_the_points(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"log:1e-3\.\.1:5"):
        made(tmp_path, sampler="grid")


def test_samplers_and_trials_that_are_not_given(tmp_path: Path) -> None:
    assert (made(tmp_path).sampler, made(tmp_path).trials) == ("tpe", 20)
    assert made(tmp_path, {"seed": "0..4"}).trials == 5
    small = made(tmp_path, {"seed": [1, 2], "batch.size": [4, 8, 16]})
    assert (small.sampler, small.trials) == ("grid", 6)
    assert made(tmp_path, {"seed": "0..1000"}).sampler == "tpe"


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20min", SweepBudget(seconds=1200)),
        ("24", SweepBudget(trials=24)),
        ("24 trials", SweepBudget(trials=24)),
        ("5USD", SweepBudget(usd=5)),
    ],
)
def test_budgets(text: str, budget: SweepBudget) -> None:
    assert SweepBudget.parse(text) == budget


def test_a_budget_in_usd_needs_a_price(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="usd_per_hour"):
        made(tmp_path, budget="5USD")


def test_a_sweep_file_is_what_the_command_line_says(tmp_path: Path) -> None:
    prepare(tmp_path)
    file = tmp_path / "a.yaml"
    file.write_text(
        "recipe: recipe.yaml\nover: {optimizer.lr: log:1e-3..1, seed: 0..4}\ntrials: 8\nset: {until: 9steps}\n"
    )
    assert is_sweep_file(file)
    assert not is_sweep_file(tmp_path / "recipe.yaml")
    by_file = read_sweep(file, environ={}, folder=str(tmp_path))
    over = over_of(["optimizer.lr=log:1e-3..1", "seed=0..4"])
    by_words = read_sweep(
        tmp_path / "recipe.yaml",
        over=over,
        settings=["until=9steps"],
        environ={},
        name="a",
        trials=8,
        folder=str(tmp_path),
    )
    assert by_file.to_yaml() == by_words.to_yaml()
    assert read_sweep(file, environ={}, trials=3).trials == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trails: 8", r"a.yaml:3: trails: is not a key of a sweep(?s:.)*did you mean 'trials'"),
        ("trials: '8'", r"a.yaml:3: trials: .*\(got '8'\)"),
    ],
)
def test_a_wrong_line_of_a_sweep_file_is_named(tmp_path: Path, line: str, message: str) -> None:
    prepare(tmp_path)
    (tmp_path / "a.yaml").write_text(f"recipe: recipe.yaml\nover: {{seed: 0..4}}\n{line}\n")
    with pytest.raises(RecipeError, match=message):
        read_sweep(tmp_path / "a.yaml", environ={})


def test_overrides_of_the_environment_are_settings_of_the_sweep(tmp_path: Path) -> None:
    found = read_sweep(prepare(tmp_path), over=LR, environ={"TRAINWRIGHT_BATCH__SIZE": "4", "TRAINWRIGHT_GRACE_S": "9"})
    assert found.settings == ("batch.size=4",)


def test_a_recipe_that_changed_since_is_refused(tmp_path: Path) -> None:
    sweep = made(tmp_path)
    sweep.folder.mkdir()
    (sweep.folder / "sweep.yaml").write_text(sweep.to_yaml())
    assert read_sweep(sweep.folder, environ={}).to_yaml() == sweep.to_yaml()
    with sweep.recipe.open("a") as file:
        file.write("seed: 3\n")
    with pytest.raises(UsageError, match="has changed since the sweep began"):
        read_sweep(sweep.folder, environ={})


def test_another_sweep_in_the_folder_is_named_by_its_keys(tmp_path: Path) -> None:
    one, other = made(tmp_path, trials=3, jobs=2), made(tmp_path, {"seed": "0..4"}, seed=1)
    assert differences(spec_of(one.to_yaml()), spec_of(made(tmp_path, trials=9).to_yaml())) == []
    assert set(differences(spec_of(one.to_yaml()), spec_of(other.to_yaml()))) == {"over", "sampler", "seed"}


def test_finished_trials_come_first_then_those_that_came_further() -> None:
    ended = [
        ("stopped", None, 5),
        ("pruned", 0.1, 10),
        ("finished", 0.5, 30),
        ("pruned", 0.9, 20),
        ("finished", 0.4, 30),
    ]
    rows = [TrialRow(n, {}, value, steps, 1.0, word) for n, (word, value, steps) in enumerate(ended)]
    assert [row.trial for row in ranked(rows, "min")] == [4, 2, 3, 1, 0]
    assert [row.trial for row in ranked(rows, "max")] == [2, 4, 3, 1, 0]


def course(params: Mapping[str, object]) -> list[tuple[int, float]]:
    """Values of a trial by step, as a function of its parameters: the best learning rate is 0.03."""
    lr = params["optimizer.lr"]
    assert isinstance(lr, float)
    loss = abs(math.log10(lr / 0.03))
    return [(step, loss + 1 / step + 0.3 * math.sin(13 * lr + step)) for step in (3, 9, 27, 81)]


class Killed(Exception):
    """Stands for SIGKILL: nothing of the process is left."""


def go_on(sweep: Sweep, draw: random.Random | None) -> None:
    """Runs a sweep to its end; with ``draw``, a kill may come before each thing that is written."""

    def may_die() -> None:
        if draw is not None and draw.random() < 0.15:
            raise Killed

    trials = StudyTrials(sweep)
    may_die()
    trials.load(trials.num_started - 1)
    pending = [trials.unfinished[number] for number in sorted(trials.unfinished)]
    while pending or trials.count < sweep.trials:
        may_die()
        trial = pending.pop(0) if pending else trials.ask()
        value = math.nan
        for step, value in course(trial.params):
            may_die()
            if trials.report(trial, step, value):
                break
        may_die()
        ended = "pruned" if trial.pruned_at else "finished"
        trials.finish(trial, TrialRow(trial.number, trial.params, value, trial.pruned_at or 81, 0.0, ended))
        may_die()


@pytest.mark.slow  # some 40 studies
@pytest.mark.parametrize("pruner", ["none", "median", "hyperband"])
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_kill_at_any_instant_changes_no_trial(sampler: Any, pruner: Any, tmp_path: Path) -> None:
    sweeps = []
    for name in ("undisturbed", "killed"):
        sweep = made(tmp_path, sampler=sampler, pruner=pruner, trials=20, name=name)
        sweep.folder.mkdir()
        sweeps.append(sweep)
    draw, kills = random.Random(1), 0
    with quiet_optuna():
        go_on(sweeps[0], None)
        while True:
            try:
                go_on(sweeps[1], draw)
                break
            except Killed:
                kills += 1
                if draw.random() < 0.5:  # a line that is half written
                    with (sweeps[1].folder / JOURNAL).open("ab") as file:
                        file.write(b'{"op_code":4,"stu')
        tables = [StudyTrials(sweep).rows() for sweep in sweeps]
    assert kills > 10
    assert tables[0] == tables[1]
    assert [row.trial for row in tables[0]] == [*range(20)]
    assert any(row.ended == "pruned" for row in tables[0]) == (pruner != "none")


def test_tpe_learns_from_earlier_trials_and_a_random_sampler_does_not(tmp_path: Path) -> None:
    ends = {}
    with quiet_optuna():
        for sampler in ("tpe", "random"):
            for best in (0.002, 0.5):
                sweep = made(tmp_path, sampler=sampler, trials=13, name=f"{sampler}-{best}")
                sweep.folder.mkdir()
                trials = StudyTrials(sweep)
                for _ in range(13):
                    trial = trials.ask()
                    lr = trial.params["optimizer.lr"]
                    assert isinstance(lr, float)
                    trials.finish(
                        trial, TrialRow(trial.number, trial.params, abs(math.log(lr / best)), 1, 0.0, "finished")
                    )
                ends[sampler, best] = [row.params for row in trials.rows()][-1]
    assert ends["random", 0.002] == ends["random", 0.5]
    assert ends["tpe", 0.002] != ends["tpe", 0.5]


def test_optunas_own_reader_opens_the_journal(tmp_path: Path) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    over = {**LR, "model.args.sizes": [[8, 2], [8, 8, 2]]}
    sweep = made(tmp_path, over, sampler="random", trials=3, name="a")
    sweep.folder.mkdir()
    with quiet_optuna():
        trials = StudyTrials(sweep)
        for value, ended in ((0.5, "finished"), (None, "diverged"), (None, "failed")):
            trial = trials.ask()
            trials.finish(trial, TrialRow(trial.number, trial.params, value, 7, 0.0, ended))
        study = optuna.load_study(
            study_name="a", storage=JournalStorage(JournalFileBackend(str(sweep.folder / JOURNAL)))
        )
    assert [each.state.name for each in study.trials] == ["COMPLETE", "COMPLETE", "FAIL"]
    assert [each.value for each in study.trials] == [0.5, math.inf, None]
    assert study.best_trial.params["model.args.sizes"] in ("[8, 2]", "[8, 8, 2]")
    assert trials.rows()[0].params["model.args.sizes"] in ([8, 2], [8, 8, 2])


def test_the_example_is_a_sweep_and_the_one_of_the_page() -> None:
    example = ROOT / "examples" / "sweep.yaml"
    sweep = read_sweep(example, environ={})
    assert (sweep.trials, sweep.pruner, sweep.metric, len(sweep.space)) == (12, "median", "accuracy", 3)
    keys = example.read_text().partition("recipe:")[2]
    assert f"recipe:{keys}" in (ROOT / "docs/how-to/sweep.md").read_text()


def test_a_sweep_whose_trials_all_failed_says_what_to_do(tmp_path: Path) -> None:
    row = TrialRow(0, {"seed": 1}, None, 0, 0.0, "failed", reason="the recipe has 1 problem:\n  it is wrong")
    lines = SweepResult(tmp_path, "loss", "min", (row,) * 3, why_ended="the first 3 trials failed").lines()
    assert lines[1].endswith("the recipe has 1 problem: it is wrong")
    assert f"remove the folder (rm -r {tmp_path})" in lines[-1]
