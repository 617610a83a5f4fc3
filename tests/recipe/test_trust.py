"""``--allow``: the code that a foreign recipe may run."""

from __future__ import annotations

import pytest

from trainwright.errors import RecipeError
from trainwright.recipe import from_mapping
from trainwright.recipe.resolve import require_allowed


@pytest.mark.parametrize("data", [False, True], ids=["of the model", "of the tokenizer"])
def test_code_of_a_repository_must_be_allowed_by_its_name(data: bool) -> None:
    trusting = {"trust_remote_code": True}
    train = {"use": "chat", "args": {"path": "chats.jsonl", **(trusting if data else {})}}
    model = {"use": "hf", "name": "org/model", **({} if data else trusting)}
    loaded = from_mapping({"model": model, "data": {"train": train}})
    with pytest.raises(RecipeError, match="trust_remote_code is not allowed"):
        require_allowed(loaded, [])
    require_allowed(loaded, ["trust_remote_code"])
    model = {"use": "hf", "name": "org/model", "trust_remote_code": False}
    require_allowed(from_mapping({"model": model, "data": {"train": "digits"}}), [])
