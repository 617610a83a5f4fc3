"""A ladder of a model that is fast in bfloat16 and overflows in float16: what it adopts, where it stops."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainwright as tw
from tests import forked
from trainwright.cli import app
from trainwright.commands.ladder.result import Ladder
from trainwright.errors import UsageError
from trainwright.recipe import load
from trainwright.trials import read_trial

pytestmark = [
    pytest.mark.examined,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_trials"),
]

MODEL = """\
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Large(nn.Module):
    \"\"\"Hidden values near 1e5, which only a normalisation sees. Slow without autocast, to be sure of a gain.\"\"\"

    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        nn.init.normal_(self.hidden.weight, std=3e4)

    def forward(self, x):
        if not torch.is_autocast_enabled("cpu"):
            time.sleep(0.03)
        time.sleep(float(os.environ.get("PAUSE_S", 0)))
        return self.out(self.norm(self.hidden(x)))


def data(count=256, seed=0):
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1))
"""
RECIPE = """\
name: overflow
until: 40steps
model: {use: "overflow:Large"}
data:
  train: {use: "overflow:data"}
  val: {use: "overflow:data", args: {count: 64, seed: 1}}
loss: cross_entropy
batch: {size: 16}
optimizer: {use: adamw, lr: 1e-2}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "overflow.py").write_text(MODEL)
    (folder / "overflow.yaml").write_text(RECIPE)
    return folder / "overflow.yaml"


@pytest.fixture(scope="module")
def climbed(recipe: Path, forked_trials: None) -> Ladder:
    return tw.ladder(recipe, steps=16, folder=recipe.parent / "ladder", threads=1, quiet=True)


def test_it_adopts_what_pays_and_stops_where_float16_overflows(climbed: Ladder) -> None:
    assert [(rung.name, rung.verdict.outcome) for rung in climbed.rungs] == [
        ("fp32", "baseline"),
        ("fp32-seed", "baseline"),
        ("bf16", "adopted"),
        ("fp16", "breaks"),
    ]
    broken = climbed.rungs[-1]
    assert [each.code for each in broken.findings] == ["precision.fp16_overflow"]
    assert broken.measured is not None and broken.measured.skipped == 16
    assert (climbed.best, climbed.exit_code) == ("bf16", 3)
    text = "\n".join(climbed.lines())
    assert "65504" in text and "--skip fp16" in text


def test_the_recipe_that_it_writes_repeats_its_best_rung(climbed: Ladder, tmp_path: Path) -> None:
    best = climbed.best_recipe
    assert best is not None
    text = best.read_text()
    assert "precision: bf16  # ladder, bf16: " in text
    assert str(load(best).recipe.until) == "40steps", "the length is that of the user"
    sets = ["--set", "until=16steps", "--set", f"folder={tmp_path}"]
    again = forked.run(forked.COMMAND_LINE, "train", str(best), *sets, cwd=best.parent.parent)
    assert again.returncode == 0, again.stderr
    rung = next(each for each in climbed.rungs if each.name == "bf16")
    assert rung.run is not None
    assert read_trial(tmp_path / "overflow").val_loss == read_trial(rung.run).val_loss


def test_finished_rungs_are_read(recipe: Path, climbed: Ladder) -> None:
    logs = {path: path.stat().st_mtime_ns for path in climbed.folder.glob("*/log.jsonl")}
    arguments = ["ladder", str(recipe), "--steps", "16", "--folder", str(climbed.folder), "--threads", "1", "--json"]
    done = CliRunner().invoke(app, arguments)
    shown = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 3
    assert shown == json.loads((climbed.folder / "ladder.json").read_text())
    assert shown["rungs"] == json.loads(json.dumps(climbed.to_json()))["rungs"]
    assert {path: path.stat().st_mtime_ns for path in climbed.folder.glob("*/log.jsonl")} == logs


def test_a_recipe_in_float16_begins_in_float32_too(recipe: Path, climbed: Ladder) -> None:
    found = tw.ladder(recipe, settings=["precision=fp16"], steps=16, folder=climbed.folder, threads=1, quiet=True)
    assert json.dumps(found.to_json()) == json.dumps(climbed.to_json()), "the same runs, which are read"
    assert "precision: bf16  # ladder, bf16: " in (climbed.folder / "best.yaml").read_text()


def test_a_ladder_that_is_killed_goes_on(recipe: Path, climbed: Ladder, tmp_path: Path) -> None:
    folder = tmp_path / "ladder"
    shutil.copytree(climbed.folder, folder)
    rungs = {rung.name: folder / rung.run.name for rung in climbed.rungs if rung.run}
    shutil.rmtree(rungs["fp16"])
    words = ["ladder", str(recipe), "--steps", "16", "--threads", "1", "--folder", str(folder)]
    process = forked.Forked(forked.FORKING_TRIALS, *words, env={"PAUSE_S": "0.1"})
    log, end_s = rungs["fp16"] / "log.jsonl", time.monotonic() + 250
    while not (log.is_file() and '"kind":"step"' in log.read_text()) and time.monotonic() < end_s:
        time.sleep(0.05)
    process.kill()
    process.wait()
    found = tw.ladder(recipe, steps=16, folder=folder, threads=1, quiet=True)
    assert [(rung.name, rung.verdict.outcome) for rung in found.rungs] == [
        (rung.name, rung.verdict.outcome) for rung in climbed.rungs
    ]
    starts = {name: (run / "log.jsonl").read_text().count('"kind":"started"') for name, run in rungs.items()}
    assert starts == {"fp32": 1, "fp32-seed": 1, "bf16": 1, "fp16": 2}


def test_the_page_needs_nothing_else(climbed: Ladder) -> None:
    page = (climbed.folder / "ladder.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "precision.fp16_overflow" in page
    assert "https://" not in page.partition("</style>")[2].partition("<script")[0]


def test_a_budget_ends_it_before_a_rung_begins(recipe: Path, climbed: Ladder) -> None:
    found = tw.ladder(recipe, steps=16, folder=climbed.folder, threads=1, budget_s=0.0, quiet=True)
    assert found.out_of_time
    assert {rung.verdict.outcome for rung in found.rungs} == {"baseline", "not tried"}
    assert (found.best, found.exit_code) == ("fp32", 0)


def test_a_function_is_refused_with_what_to_write() -> None:
    with pytest.raises(UsageError, match="not a function") as raised:
        tw.ladder(lambda: None, quiet=True)  # type: ignore[arg-type]
    assert "model.use" in str(raised.value)


def test_a_baseline_that_does_not_train_is_an_error_with_its_reason(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no_such"):
        tw.ladder(recipe, settings=["model.use=overflow:no_such"], steps=16, folder=tmp_path / "out", quiet=True)
