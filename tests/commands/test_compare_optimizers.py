"""compare-optimizers: a learning rate for each by a range test, runs of one length, and what is refused before them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainwright as tw
from trainwright.cli import app
from trainwright.errors import RecipeError, UsageError
from trainwright.recipe import load

RECIPE = """\
name: small
until: 6steps
device: cpu
model: {use: mlp, args: {sizes: [64, 8, 10]}}
data: {train: digits}
optimizer: {use: sgd, args: {momentum: 0.5}, weight_decay: 0.01}
log: {doctor: false, every: 1steps}
"""


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.process
@pytest.mark.slow
def test_each_is_trained_at_the_rate_of_its_range_test() -> None:
    words = ["compare-optimizers", "recipe.yaml", "sgd", "torch.optim:NAdam", "--range-steps", "40", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    rows = {row["optimizer"]: row for row in found["rows"]}
    assert set(rows) == {"sgd", "torch.optim:NAdam"}
    losses = [row["loss"] for row in found["rows"]]
    assert losses == sorted(losses)
    args = {"sgd": {"momentum": 0.5}, "torch.optim:NAdam": {}}
    for name, row in rows.items():
        recipe = load(Path(row["run"]) / "recipe.yaml").recipe
        assert (recipe.optimizer.use, recipe.optimizer.lr, recipe.optimizer.args) == (name, row["lr"], args[name])
        assert recipe.optimizer.weight_decay == 0.01
        assert row["ended"] == "finished" and row["lr_from_range_test"]


def test_what_cannot_be_used_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="1 of them different"):
        tw.compare_optimizers("recipe.yaml", ["sgd", "sgd"])
    with pytest.raises(RecipeError, match="must be a known optimizer"):
        tw.compare_optimizers("recipe.yaml", ["sgd", "sgdd"])
    assert not (tmp_path / "runs").exists()
