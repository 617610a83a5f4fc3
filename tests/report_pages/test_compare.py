"""``trainwright compare``: what was asked first, then what came of it, with the spread over seeds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.report_pages.runs import ended, evaluated, found, make_run, started, step
from trainwright.cli import app
from trainwright.report.pages import log as log_module
from trainwright.report.pages.compare import RunComparison
from trainwright.report.pages.render import runs_page
from trainwright.report.pages.view import RunView
from trainwright.runs.records import Record


def records(*losses: float, steps: int = 40, finding: bool = False) -> list[Record]:
    every = steps // len(losses)
    trained: list[Record] = [started(), *map(step, range(1, steps + 1)), *([found()] if finding else [])]
    return [*trained, *(evaluated(every * (i + 1), loss) for i, loss in enumerate(losses)), ended(steps)]


def compared(*paths: Path) -> RunComparison:
    return RunComparison.of([RunView.read(path) for path in paths])


def test_runs_are_compared_by_what_was_asked_and_what_came_of_it(tmp_path: Path) -> None:
    slow = make_run(tmp_path, "slow", records(1.0, 0.9, 0.8, 0.7), settings={"optimizer.lr": 0.001}).path
    fast = make_run(tmp_path, "fast", records(0.8, 0.6, 0.5, 0.55, finding=True), settings={"optimizer.lr": 0.01}).path
    both = compared(slow, fast)
    assert both.recipe is not None and both.provenance is not None
    assert [(each.path, each.values) for each in both.recipe] == [("optimizer.lr", ("0.001", "0.01"))]
    assert both.plan == () and [each.path for each in both.provenance][-1] == "hostname"
    assert both.target == 0.7 and [each.reached_step for each in both.outcomes] == [40, 20]
    assert [each.best for each in both.outcomes] == [0.7, 0.5]
    assert both.outcomes[1].findings == ("optim.lr_too_high",) and both.spreads == ()
    lines = both.lines()
    assert lines[0] == "2 runs: slow, fast" and "  optimizer.lr: 0.001 | 0.01" in lines
    assert "    validation loss 0.7 reached at step 20, after 20 s" in lines


def test_times_that_each_start_measures_are_no_part_of_the_plan(tmp_path: Path) -> None:
    paths = [make_run(tmp_path, f"r{i}", records(1.0), settings={}).path for i in range(2)]
    for path, wait_s in zip(paths, (0.1, 0.2), strict=True):
        plan = json.loads((path / "plan.json").read_text())
        (path / "plan.json").write_text(json.dumps({**plan, "step_s": 1 + wait_s, "wait_s": wait_s}))
    assert compared(*paths).plan == ()


def test_what_differs_in_a_third_run_only_has_the_value_of_all(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [{"seed": 1}, {"seed": 1}, {"seed": 1, "optimizer.lr": 0.5}]
    paths = [make_run(tmp_path, f"r{i}", records(1.0), settings=each).path for i, each in enumerate(settings)]
    found = compared(*paths).recipe
    assert found is not None
    assert [(each.path, each.values) for each in found] == [("optimizer.lr", ("0.001", "0.001", "0.5"))]


def test_runs_of_one_recipe_are_told_with_their_spread(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path, f"seed-{seed}", records(1.0, loss), settings={"seed": seed}).path
        for seed, loss in ((1, 0.4), (2, 0.5), (3, 0.6))
    ]
    other = make_run(tmp_path, "other", records(1.0, 0.9), settings={"seed": 1, "optimizer.lr": 0.5}).path
    (val, best, _) = compared(*paths, other).spreads
    assert val.names == ("seed-1", "seed-2", "seed-3") and val.measure == "validation loss"
    assert val.mean == pytest.approx(0.5) and val.deviation == pytest.approx(0.1) and best.mean == val.mean


@pytest.mark.slow
def test_without_validation_single_dips_do_not_count(tmp_path: Path) -> None:
    steady: list[Record] = [started(), *(step(n, 1.0 - n / 200) for n in range(1, 101)), ended(100)]
    dips = [step(n, 0.0 if n == 50 else 1.0 - n / 200) for n in range(1, 101)]
    paths = [
        make_run(tmp_path, "steady", steady, settings={}).path,
        make_run(tmp_path, "dips", [started(), *dips, ended(100)], settings={}).path,
    ]
    both = compared(*paths)
    assert both.measure.startswith("training loss") and both.target is not None and both.target > 0.5
    assert both.outcomes[0].reached_step == 100


def test_what_stays_of_a_long_log_does_not_mislead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thinned log keeps the extremes, and their median would be far from the loss."""
    monkeypatch.setattr(log_module, "MAX_ROWS", 1000)
    monkeypatch.setattr(log_module, "BUCKETS", 20)
    paths = []
    for name, level in (("low", 1.0), ("high", 1.2)):
        noise = random.Random(name)
        losses = [step(n, level + noise.random()) for n in range(1, 3001)]
        paths.append(make_run(tmp_path, name, [started(), *losses, ended(3000)], settings={}).path)
    both = compared(*paths)
    assert both.target is not None and abs(both.target - 1.7) < 0.15


def test_a_watched_loop_has_no_recipe_to_compare(tmp_path: Path) -> None:
    ours = make_run(tmp_path, "ours", records(1.0), settings={}).path
    loop = make_run(tmp_path, "loop", [started(), step(1)]).path
    both = compared(ours, loop)
    assert "recipe: not every run has one" in both.lines() and both.target is None


@pytest.mark.slow
def test_the_verb(tmp_path: Path) -> None:
    paths = [str(make_run(tmp_path, f"r{lr}", records(1.0), settings={"optimizer.lr": lr}).path) for lr in (0.1, 0.2)]
    page = tmp_path / "both.html"
    done = CliRunner().invoke(app, ["compare", *paths, "--html", str(page), "--json"])
    assert json.loads(done.output)["recipe"][0] == {"path": "optimizer.lr", "values": ["0.1", "0.2"]}
    assert "Differences of the recipe" in page.read_text()
    printed = CliRunner().invoke(app, ["compare", *paths]).output
    assert printed.index("optimizer.lr") < printed.index("outcomes")
    assert CliRunner().invoke(app, ["compare", paths[0]]).exit_code == 2


def test_three_runs_or_more_have_parallel_coordinates_of_what_differs(tmp_path: Path) -> None:
    def run(number: int, loss: float) -> Path:
        settings = {"optimizer.lr": 10.0**-number, "optimizer.use": "sgd" if number == 3 else "adamw", "seed": number}
        return make_run(tmp_path, f"r{number}", records(loss), settings=settings).path

    paths = [run(1, 0.9), run(2, 0.5), run(3, 0.7)]
    assert compared(*paths[:2]).parallel == ""
    drawn = compared(*paths).parallel
    assert drawn.count("<polyline") == 3
    for name in ("optimizer.lr", "optimizer.use", "sgd", "adamw", "best validation loss"):
        assert f">{name}<" in drawn, name
    assert "seed" not in drawn
    page = runs_page([RunView.read(path) for path in paths])
    assert 'alt="Parallel coordinates' in page
    unmeasured = make_run(tmp_path, "none", [started()], settings={"optimizer.lr": 5.0}).path
    assert compared(*paths, unmeasured).parallel == ""
