"""Arguments of a catalog row that a recipe writes beside ``use`` instead of in ``args``."""

from __future__ import annotations

import pytest

from trainwright.errors import RecipeError
from trainwright.recipe import dump, from_mapping, json_schema
from trainwright.recipe.load import load

DATA = {"train": "digits"}


def test_they_become_arguments() -> None:
    beside = {"use": "hf", "name": "base", "dtype": "bf16", "args": {"n_layer": 2}}
    loaded = from_mapping({"model": beside, "data": DATA}, overrides=["model.revision=v1"])
    assert loaded.recipe.model.args == {"name": "base", "dtype": "bf16", "n_layer": 2, "revision": "v1"}
    again = from_mapping({"model": {"use": "hf", "args": loaded.recipe.model.args}, "data": DATA})
    assert again.recipe == loaded.recipe and "name: base" in dump(loaded.recipe)


def test_only_those_of_the_row_do() -> None:
    for model in ({"use": "hf", "nam": "base"}, {"use": "gpt", "revision": "v1"}):
        with pytest.raises(RecipeError, match="is not a key of model"):
            from_mapping({"model": model, "data": DATA})


def test_one_that_is_written_twice_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model.name: is also in args"):
        from_mapping({"model": {"use": "hf", "name": "a", "args": {"name": "b"}}, "data": DATA})


def test_a_name_of_a_validation_set_stays_its_name() -> None:
    more = [{"use": "chat", "name": "held", "path": "a.jsonl"}]
    recipe = from_mapping({"model": "mlp", "data": {**DATA, "more_val": more}}).recipe
    assert recipe.data.more_val[0].name == "held" and recipe.data.more_val[0].args == {"path": "a.jsonl"}


def test_places_and_the_schema_know_them(tmp_path: object) -> None:
    from pathlib import Path

    file = Path(str(tmp_path)) / "a.yaml"
    file.write_text("model:\n  use: hf\n  name: base\ndata: {train: digits}\n")
    assert load(file, environ={}).source.where("model.args.name") == f"{file}:3"
    text = str(json_schema())
    assert "The same as args.trust_remote_code." in text
