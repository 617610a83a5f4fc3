"""Whatever is done to a recipe, the answer is a Recipe or a RecipeError in plain words."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.recipe.complete import FULL
from trainwright.errors import RecipeError
from trainwright.recipe import Recipe, dump, from_mapping, load
from trainwright.recipe.yaml_core import read, write

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 3.0, 10**30, 10**400, 1e-3, math.inf, -math.inf, math.nan),
    *("", " ", "gpt", "1e-3", "10ep", "0steps", "a.b:c", "日本", "\x00", "x" * 10_000, "{gt}"),
    *([], [1], ["a"], [[]], {}, {"use": "mlp"}, {"a": {"b": 1}}, {"1": 2}, [{"match": "*"}]),
]
ODD_VALUES: list[Any] = [  # what YAML cannot hold, and Python can
    *((), (1,), {1: 2}, {None: 1}, {"a": {2: 3}}, {(1, 2): 3}, {1, 2}, b"x", object(), print, 1j),
    *("\ud800", {"\ud800": 1}, 10**5000, {10**5000: 1}),
]


def containers(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, (dict, list)) and value else []
    return own + [found for item in inner for found in containers(item)]


def mutate(mapping: dict[str, Any], rng: random.Random, values: list[Any]) -> None:
    target = rng.choice(containers(mapping) or [mapping])
    action = rng.choice(["delete", "rename", "retype", "retype", "move"])
    if isinstance(target, list):
        target[rng.randrange(len(target))] = copy.deepcopy(rng.choice(values))
        return
    key = rng.choice(list(target) or ["seed"])
    if action == "delete":
        target.pop(key, None)
    elif action == "rename":
        letters = list(key if isinstance(key, str) else "odd")
        rng.shuffle(letters)
        target["".join(letters)] = target.pop(key, 1)
    elif action == "move":
        rng.choice([found for found in containers(mapping) if isinstance(found, dict)] or [mapping])[key] = 3
    else:
        target[key] = copy.deepcopy(rng.choice(values))


def assert_plain_words(error: RecipeError) -> None:
    assert error.problems
    for problem in error.problems:
        assert problem.rule and problem.remedy and problem.where, problem
        assert "Input should" not in problem.rule and "{" not in problem.rule, problem
    assert str(error).encode()  # printable anywhere


def load_mutated_mapping(seed: int) -> None:
    rng = random.Random(seed)
    mapping = copy.deepcopy(FULL)
    for _ in range(rng.randint(1, 6)):
        mutate(mapping, rng, VALUES + ODD_VALUES)
    try:
        recipe = from_mapping(mapping).recipe
    except RecipeError as error:
        assert_plain_words(error)
        return
    assert isinstance(recipe, Recipe)
    written: Any = read(dump(recipe), "r.yaml").value
    assert from_mapping(written).recipe == recipe


@pytest.mark.slow
def test_mutated_mappings() -> None:
    for seed in range(150):
        load_mutated_mapping(seed)


def load_mutated_text(seed: int, path: Path) -> None:
    """Cut out, double and swap characters in the YAML itself."""
    rng = random.Random(seed)
    text = list(write(FULL))
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(text))
        text[at : at + rng.randint(0, 3)] = rng.choice(
            ["", "\t", ":", "\n", "[", "}", "'", "&a ", "*a", "!x ", "? ", "- ", "\x07", "é"]
        )
    path.write_text("".join(text), encoding="utf-8")
    try:
        assert isinstance(load(path, environ={}).recipe, Recipe)
    except RecipeError as error:
        assert_plain_words(error)


@pytest.mark.slow
def test_mutated_text(tmp_path: Path) -> None:
    for seed in range(100):
        load_mutated_text(seed, tmp_path / "r.yaml")


def load_random_overrides(seed: int) -> None:
    rng = random.Random(seed)
    keys = "model use args optimizer groups 0 1 9 lr data train batch size seed".split()  # noqa: SIM905
    values = ["1", "gpt", "", "[1]", "{use: sgd}", "[[", "*a", "'", "10ep", "!x y", "&a [*a]", "a=b", "\t", "{", "é: 1"]
    overrides = [
        f"{'.'.join(rng.choices(keys, k=rng.randint(1, 4)))}={rng.choice(values)}" for _ in range(rng.randint(1, 6))
    ]
    try:
        assert isinstance(from_mapping(FULL, overrides=overrides).recipe, Recipe)
    except RecipeError as error:
        assert_plain_words(error)


def test_random_overrides() -> None:
    for seed in range(100):
        load_random_overrides(seed)


def cyclic() -> dict[str, Any]:
    inner: list[Any] = []
    inner += [inner, inner]
    return {"a": inner}


def test_hostile_arguments() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for args in (cyclic(), {"a": deep}, {"a": list(range(20_000))}):
        with pytest.raises(RecipeError) as caught:
            from_mapping({**FULL, "loss": {"use": "mse", "args": args}})
        assert_plain_words(caught.value)
        assert caught.value.problems[0].path.startswith("loss.args")
