"""The recipe as a value: defaults, kinds of parts, the round trip through YAML, frozen-ness, JSON Schema."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.recipe.complete import FULL, SMALL
from trainwright import recipe as room
from trainwright.errors import RecipeError
from trainwright.plan.resume_changes import compare_recipes
from trainwright.recipe import Duration, dump, from_mapping, json_schema, load
from trainwright.recipe.schema import Optimizer


def test_defaults() -> None:
    recipe = from_mapping(SMALL).recipe
    assert (recipe.name, recipe.seed, recipe.until) == ("run", 1337, Duration(1, "ep"))
    assert (recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation) == (32, None, None)
    assert (recipe.loss.use, recipe.optimizer.use, recipe.optimizer.lr) == ("cross_entropy", "adamw", 1e-3)
    assert recipe.schedule.warmup == Duration(0, "steps")
    assert recipe.checkpoint.every == Duration(0.25, "run")
    assert recipe.model.args == {} and recipe.data.val is None


def test_what_is_not_stated_does_not_change_the_mathematics() -> None:
    recipe = from_mapping(SMALL).recipe
    assert recipe.optimizer.clip.by == "none" and recipe.schedule.use == "constant" and recipe.precision is None
    assert recipe.optimizer.weight_decay == 0.01, "the default of torch.optim.AdamW"
    assert recipe.optimizer.decay_norms_and_biases and recipe.optimizer.args == {}
    assert (recipe.model.ema, recipe.model.compile, recipe.preset) == (None, False, None)
    assert (recipe.data.drop_last, recipe.spikes.policy, recipe.optimizer.offload) == (False, "warn", False)


@pytest.mark.parametrize("use", ["sgd", "adafactor", "muon", "lars"])
def test_an_optimizer_has_its_own_defaults(use: str) -> None:
    row, optimizer = room.OPTIMIZERS[use], from_mapping({**SMALL, "optimizer": use}).recipe.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.args) == (row.lr, row.weight_decay, {})
    stated = from_mapping({**SMALL, "optimizer": {"use": use, "lr": 0.5, "weight_decay": 0.25}}).recipe.optimizer
    assert (stated.lr, stated.weight_decay) == (0.5, 0.25)


def test_an_optimizer_that_is_not_in_the_box_keeps_its_defaults_to_itself() -> None:
    optimizer = from_mapping({**SMALL, "optimizer": "mine.optim:Mine"}).recipe.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (None, None)


def test_a_bound_alone_clips_by_the_norm() -> None:
    assert from_mapping(SMALL, overrides=["optimizer.clip.at=0.5"]).recipe.optimizer.clip.by == "norm"
    with_measure = {**SMALL, "optimizer": {"clip": {"by": "value", "at": 0.5}}}
    assert from_mapping(with_measure).recipe.optimizer.clip.by == "value"


RECOMMENDED = {"preset": "recommended"}


@pytest.mark.parametrize(
    ("best", "mode"),
    [
        *((best, "max") for best in ("accuracy", "half.accuracy", "f1.0", "reward_accuracy")),
        *((best, "min") for best in ("loss", "noisy.loss", "calibration_error", "mse.0", "perplexity")),
    ],
)
def test_the_name_of_a_metric_tells_which_value_is_best(best: str, mode: str) -> None:
    assert from_mapping({**SMALL, "checkpoint": {"best": best}}).recipe.checkpoint.best_mode == mode
    stated = from_mapping({**SMALL, "checkpoint": {"best": best, "best_mode": "min"}})
    assert stated.recipe.checkpoint.best_mode == "min"


@pytest.mark.parametrize("best", ["reward", "neg_mse", "lm_eval.task.acc"])
def test_a_metric_whose_name_tells_no_mode_needs_one(best: str) -> None:
    with pytest.raises(RecipeError, match=r"checkpoint\.best_mode: is required(.|\n)*set checkpoint\.best_mode"):
        from_mapping({**SMALL, "checkpoint": {"best": best}})
    assert (
        from_mapping({**SMALL, "checkpoint": {"best": best, "best_mode": "max"}}).recipe.checkpoint.best_mode == "max"
    )


def test_the_recommended_settings() -> None:
    loaded = from_mapping({**SMALL, **RECOMMENDED})
    recipe, optimizer = loaded.recipe, loaded.recipe.optimizer
    assert (recipe.precision, recipe.schedule.use, str(recipe.schedule.warmup)) == ("auto", "cosine", "0.05run")
    assert (optimizer.clip.by, optimizer.clip.at, optimizer.decay_norms_and_biases) == ("norm", 1.0, False)
    assert loaded.by_preset == {
        "precision",
        "schedule.use",
        "schedule.warmup",
        "optimizer.clip.by",
        "optimizer.clip.at",
        "optimizer.decay_norms_and_biases",
    }
    assert from_mapping({**SMALL, **RECOMMENDED, "optimizer": "sgd"}).recipe.optimizer.args == {"momentum": 0.9}


@pytest.mark.parametrize(
    ("stated", "path", "value"),
    [
        ({"precision": "fp32"}, "precision", "fp32"),
        ({"schedule": "wsd"}, "schedule.warmup", "0steps"),
        ({"schedule": {"warmup": "10steps"}}, "schedule.use", "cosine"),
        ({"optimizer": {"clip": {"at": 0.5}}}, "optimizer.clip.by", "norm"),
        ({"optimizer": {"clip": {"by": "none"}}}, "optimizer.clip.by", "none"),
        ({"optimizer": {"use": "sgd", "args": {"momentum": 0.8}}}, "optimizer.args.momentum", 0.8),
        ({"optimizer": {"decay_norms_and_biases": True}}, "optimizer.decay_norms_and_biases", True),
    ],
)
def test_what_is_stated_wins_over_the_preset(stated: dict[str, Any], path: str, value: object) -> None:
    loaded = from_mapping({**SMALL, **RECOMMENDED, **stated})
    found: Any = loaded.recipe.model_dump(mode="json")
    for key in path.split("."):
        found = found[key]
    assert found == value and path not in loaded.by_preset - {"schedule.use", "optimizer.clip.by"}
    assert from_mapping(yaml.safe_load(dump(loaded.recipe))).recipe == loaded.recipe, "a dump states every value"


def test_an_override_wins_over_the_preset_and_is_asked() -> None:
    loaded = from_mapping({**SMALL, **RECOMMENDED}, overrides=["schedule.use=constant"])
    assert loaded.recipe.schedule.use == "constant" and "schedule.use" in loaded.stated & loaded.overridden
    assert {"model.use", "data.train", "preset"} < loaded.stated and "optimizer.lr" not in loaded.stated


@pytest.mark.parametrize("recipe", sorted(path.name for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml")))
def test_a_recipe_in_the_box_states_what_it_trains_with(recipe: str) -> None:
    asked = load(Path(__file__).parents[2] / "recipes" / recipe, environ={}).stated
    for path in ("precision", "optimizer.use", "optimizer.lr", "optimizer.clip", "schedule.use"):
        assert any(each == path or each.startswith(f"{path}.") for each in asked), path


@pytest.mark.parametrize("mapping", [SMALL, FULL])
def test_dump_loads_back_equal(mapping: dict[str, Any], tmp_path: Path) -> None:
    recipe = from_mapping(mapping).recipe
    path = tmp_path / "recipe.yaml"
    path.write_text(dump(recipe), encoding="utf-8")
    assert load(path, environ={}).recipe == recipe
    assert dump(load(path, environ={}).recipe) == dump(recipe)
    assert from_mapping(yaml.safe_load(dump(recipe))).recipe == recipe  # another reader of YAML agrees


def test_a_bare_name_is_a_part() -> None:
    short = {**SMALL, "loss": "mse", "optimizer": "sgd", "schedule": "constant"}
    long = {
        "model": {"use": "gpt"},
        "data": {"train": {"use": "python-topics"}},
        "loss": {"use": "mse"},
        "optimizer": {"use": "sgd"},
        "schedule": {"use": "constant"},
    }
    assert from_mapping(short).recipe == from_mapping(long).recipe


def test_the_callers_mapping_is_left_alone() -> None:
    args = {"betas": [0.9, 0.95]}
    mapping = {**SMALL, "optimizer": {"args": args}}
    recipe = from_mapping(mapping, overrides=["optimizer.args.betas.0=0.8", "model.args.layers=2"]).recipe
    assert mapping == {**SMALL, "optimizer": {"args": {"betas": [0.9, 0.95]}}}
    args["betas"].append(1.0)
    assert recipe.optimizer.args == {"betas": [0.8, 0.95]}


def test_sections_may_be_given_as_values() -> None:
    mapping = {**SMALL, "optimizer": Optimizer(lr=0.1), "until": Duration(3, "ep")}
    recipe = from_mapping(mapping, overrides=["optimizer.clip.by=none"]).recipe
    assert (recipe.optimizer.lr, recipe.optimizer.clip.by, recipe.until.value) == (0.1, "none", 3)


def test_frozen() -> None:
    recipe = from_mapping(FULL).recipe
    for section, key in [(recipe, "seed"), (recipe.model, "use"), (recipe.optimizer.groups[0], "lr")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, 1)
    with pytest.raises(AttributeError):
        recipe.until.value = 2  # type: ignore[misc]
    assert isinstance(recipe.model.freeze, tuple)


def sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "Recipe", schema
    for name, definition in schema["$defs"].items():
        yield name, definition["anyOf"][1] if "anyOf" in definition else definition


def test_json_schema_describes_every_key_and_forbids_others() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert '"title"' not in repr(schema).replace("'", '"')
    for name, section in sections(schema):
        assert section["additionalProperties"] is False, name
        for key, value in section["properties"].items():
            described = value.get("description") or schema["$defs"][value["$ref"].split("/")[-1]]["description"]
            assert described.endswith("."), f"{name}.{key}"


def test_json_schema_agrees_with_the_check() -> None:
    schema = pytest.importorskip("jsonschema").Draft202012Validator(json_schema())
    assert schema.is_valid(SMALL)
    assert schema.is_valid(yaml.safe_load(dump(from_mapping(FULL).recipe)))
    wrong: list[dict[str, Any]] = [
        {"data": {"train": "digits"}},
        {**SMALL, "modle": 1},
        {**SMALL, "model": "gtp"},
        {**SMALL, "model": {"use": "gpt", "frozen": []}},
        {**SMALL, "until": 10},
        {**SMALL, "until": "10"},
        {**SMALL, "optimizer": {"lr": 0}},
        {**SMALL, "optimizer": {"groups": [{"lr": 1.0}]}},
        {**SMALL, "batch": {"size": 1.5}},
        {**SMALL, "precision": "fp4"},
        {**SMALL, "data": {"train": "digits", "pin_memory": "yes"}},
        {**SMALL, "log": {"sinks": ["tensorbord"]}},
        {**SMALL, "name": "a/b"},
    ]
    for mapping in wrong:
        assert not schema.is_valid(mapping), mapping
        with pytest.raises(RecipeError):
            from_mapping(mapping)


@pytest.mark.process
def test_importing_the_room_leaves_torch_unloaded() -> None:
    code = "import sys, trainwright.recipe; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_recipe_of_an_earlier_version_loads_without_its_former_keys() -> None:
    sections = {"model": "mlp", "data": {"train": "digits"}}
    former = {"compress": "none", "compress_rank": 4, "compress_after": 1000}
    before = {**sections, "model": {"use": "mlp", "qat": None}, "parallel": former}
    now = from_mapping(before)
    assert now.recipe == from_mapping(sections).recipe and now.stated == {"model.use", "data.train"}
    assert (
        compare_recipes(
            {**now.recipe.model_dump(mode="json"), "parallel": former}, now.recipe.model_dump(mode="json"), step=1
        )
        == []
    )
    with pytest.raises(RecipeError, match=r"parallel\.compress: is not a key"):
        from_mapping({**sections, "parallel": {"compress": "bf16"}})
