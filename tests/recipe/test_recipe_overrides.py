"""``--set`` and the environment: precedence, lists, what they make on the way, and where problems point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwright.errors import Problem, RecipeError
from trainwright.recipe import Loaded, from_mapping, load
from trainwright.recipe.duration import Duration

TEXT = """\
model: gpt
data:
  train: python-topics
optimizer:
  lr: 1e-3
  groups:
    - {match: "*.a", lr: 1e-4}
    - {match: "*.b"}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "r.yaml"
    file.write_text(TEXT)
    return file


def problems_of(path: Path, overrides: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        load(path, overrides=overrides, environ=environ or {})
    assert all(one.remedy for one in caught.value.problems)
    return list(caught.value.problems)


def test_file_then_environment_then_set(path: Path) -> None:
    def lr(loaded: Loaded) -> tuple[float | None, str]:
        return loaded.recipe.optimizer.lr, loaded.source.where("optimizer.lr")

    environ = {"TRAINWRIGHT_OPTIMIZER__LR": "2e-3"}
    assert lr(load(path, environ={})) == (1e-3, f"{path}:5")
    assert lr(load(path, environ=environ)) == (2e-3, "environment TRAINWRIGHT_OPTIMIZER__LR")
    assert lr(load(path, environ=environ, overrides=["optimizer.lr=3e-3"])) == (3e-3, "--set optimizer.lr")
    assert lr(load(path, environ={}, overrides=["optimizer.lr=1", "optimizer.lr=4e-3"]))[0] == 4e-3


def test_a_key_of_the_ranks_that_were_left_to_the_plan(path: Path) -> None:
    path.write_text(TEXT + "parallel: auto\n")
    ask = load(path, environ={}, overrides=["parallel.tensor=2"]).recipe.parallel
    assert (ask.replicate, ask.shard, ask.tensor, ask.pipeline) == ("auto", "auto", 2, "auto")


def test_the_environment_is_read_unless_one_is_given(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_SEED", "5")
    assert load(path).recipe.seed == 5
    assert load(path, environ={}).recipe.seed == 1337


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=010", "seed", 10),
        ("folder=x=y", "folder", "x=y"),
        ("model.use=mlp", "model.use", "mlp"),
        ("model=my.models:gpt", "model.use", "my.models:gpt"),
        ("model={use: mlp, args: {width: 8}}", "model.args.width", 8),
        ("model.args.layers=3", "model.args.layers", 3),
        ("model.args.sizes=[1, 2]", "model.args.sizes", [1, 2]),
        ("model.args.sizes.0=5", "model.args.sizes", [5]),
        ("data.train.args.path=a.txt", "data.train.args.path", "a.txt"),
        ("data.val=digits", "data.val.use", "digits"),
        ("data.val.use=digits", "data.val.use", "digits"),
        ("model.lora.rank=2", "model.lora.rank", 2),
        ("model.lora={}", "model.lora.rank", 8),
        ("model.freeze.0='*.wte'", "model.freeze.0", "*.wte"),
        ("optimizer.groups.0.lr=1e-2", "optimizer.groups.0.lr", 1e-2),
        ("optimizer.groups.2.match=c", "optimizer.groups.2.match", "c"),
        ("optimizer.groups=[]", "optimizer.groups", ()),
        ("checkpoint.every=null", "checkpoint.every", None),
        ("checkpoint.every=", "checkpoint.every", None),
        ("  log.every  = 7steps ", "log.every", Duration(7, "steps")),
    ],
)
def test_values(override: str, path: str, value: Any) -> None:
    mapping: dict[str, Any] = {
        "model": "gpt",
        "data": {"train": "python-topics"},
        "optimizer": {"groups": [{"match": "a"}, {"match": "b"}]},
    }
    found: Any = from_mapping(mapping, overrides=[override]).recipe
    for key in path.split("."):
        found = found[key] if isinstance(found, dict) else found[int(key)] if key.isdigit() else getattr(found, key)
    assert found == value


def test_environment_names(path: Path) -> None:
    environ = {
        "TRAINWRIGHT_MODEL__ARGS__LAYERS": "3",
        "TRAINWRIGHT_OPTIMIZER__GROUPS__0__LR": "1e-2",
        "TRAINWRIGHT_GRACE_S": "90",
        "TRAINWRIGHT_HOME": "/x",
        "TRAINWRIGHTLY": "1",
        "PATH": "/bin",
    }
    recipe = load(path, environ=environ).recipe
    assert recipe.model.args == {"layers": 3}
    assert recipe.optimizer.groups[0].lr == 1e-2


@pytest.mark.parametrize(
    ("override", "where", "rule", "remedy"),
    [
        ("optimizer.lr", "", "path=value", "--set optimizer.lr="),
        ("=3", "", "not a path", "optimizer.lr"),
        ("a..b=3", "", "not a path", "optimizer.lr"),
        (".".join("a" * 60) + "=1", "", "not a path", "optimizer.lr"),
        ("optimizer.lr=[1", "optimizer.lr", "is not YAML", "quotes"),
        ("optimizer.lr=a: b: c", "optimizer.lr", "is not YAML", "quotes"),
        ("optimizer.lr=!foo 1", "optimizer.lr", "custom tags", "remove the tag"),
        ("model={use: gpt, use: mlp}", "model.use", "twice", "keep one"),
        ("optimizer.lr=fast", "optimizer.lr", "must be a number", "0.001"),
        ("optimizer.lr=" + "9" * 5000, "optimizer.lr", "64 bits", "1e30"),
        ("optimiser.lr=1", "optimiser", "not a key", "did you mean optimizer?"),
        ("optimizer.lrr=1", "optimizer.lrr", "not a key", "did you mean optimizer.lr?"),
        ("optimizer.groups.5.lr=1", "optimizer.groups.5", "is a list of 2", "from 0 to 2"),
        ("optimizer.groups.x.lr=1", "optimizer.groups.x", "is a list of 2", "from 0 to 2"),
        ("optimizer.groups.-1.lr=1", "optimizer.groups.-1", "is a list of 2", "from 0 to 2"),
        ("optimizer.groups.²=1", "optimizer.groups.²", "is a list of 2", "from 0 to 2"),
        ("optimizer.lr.x=1", "optimizer.lr.x", "holds no keys", "set optimizer.lr"),
        ("model.lora=true", "model.lora", "mapping of keys", "{rank: 8, alpha: 16.0}"),
        ("model={lora: {rank: 0}, use: gpt}", "model.lora.rank", "more than 0", "8"),
        ("\ud800=1", "\\ud800", "not a key", "keys here"),
        ("name=\ud800", "name", "special characters", "control character"),
    ],
)
def test_problems_say_where_they_come_from(override: str, where: str, rule: str, remedy: str, path: Path) -> None:
    (found,) = problems_of(path, (override,))
    assert found.path == where
    assert found.where.startswith("--set ")
    assert rule in found.rule
    assert remedy in found.remedy
    assert str(found).encode()


def test_what_cannot_be_printed_is_escaped() -> None:
    mapping = {
        "model": "gpt",
        "data": {"train": "digits"},
        "log": {"sinks": "\ud800"},
        "loss": {"args": {"\ud800": 1}},
    }
    with pytest.raises(RecipeError) as caught:
        from_mapping(mapping)
    assert [one.path for one in caught.value.problems] == ["loss.args", "log.sinks"]
    assert b"write [\\ud800]" in str(caught.value).encode()


def test_problems_of_the_environment(path: Path) -> None:
    environ = {"TRAINWRIGHT_OPTIMISER__LR": "1", "TRAINWRIGHT_DEBUG": "1", "TRAINWRIGHT_SEED": "x"}
    found = problems_of(path, environ=environ)
    assert {(one.path, one.where) for one in found} == {
        ("optimiser", "environment TRAINWRIGHT_OPTIMISER__LR"),
        ("debug", "environment TRAINWRIGHT_DEBUG"),
        ("seed", "environment TRAINWRIGHT_SEED"),
    }
    assert "did you mean optimizer?" in next(one for one in found if one.path == "optimiser").remedy


def test_an_override_heals_the_file(path: Path) -> None:
    path.write_text(TEXT.replace("lr: 1e-3", "lr: {a: 1}"))
    assert load(path, environ={}, overrides=["optimizer.lr=1"]).recipe.optimizer.lr == 1.0


def test_another_best_metric_gets_its_own_mode(path: Path) -> None:
    path.write_text(TEXT + "checkpoint: {best: loss, best_mode: min, keep: 2}\n")

    def mode(*overrides: str) -> str:
        loaded = load(path, overrides=overrides, environ={})
        assert loaded.recipe.checkpoint.keep == 2
        return loaded.recipe.checkpoint.best_mode

    assert mode() == "min"
    assert mode("checkpoint.best=accuracy") == "max"
    assert mode("checkpoint.best_mode=min", "checkpoint.best=accuracy") == "min"


def test_integers_of_numpy_are_integers() -> None:
    recipe = from_mapping(
        {"model": "mlp", "data": {"train": "digits"}},
        overrides=[("batch.size", np.int64(4)), ("seed", np.uint8(7))],
    ).recipe
    assert (recipe.batch.size, recipe.seed, type(recipe.seed)) == (4, 7, int)
