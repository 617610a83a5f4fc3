"""Models of transformers, built offline."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from trainwright.errors import MissingExtra, UsageError
from trainwright.models.hf import hf_model
from trainwright.recipe import load
from trainwright.training.run import train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")]
TINY: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 11}


def test_the_configuration_is_taken(capfd: pytest.CaptureFixture[str]) -> None:
    model: Any = hf_model(architecture="GPT2LMHeadModel", **TINY)
    assert model(torch.zeros(2, 5, dtype=torch.int64)).logits.shape == (2, 5, 11)
    assert (model.config.n_layer, model.config.bos_token_id, model.config.eos_token_id) == (1, None, None)
    assert capfd.readouterr() == ("", "")  # transformers says a line on token ids outside of the vocabulary


def test_what_is_given_wins_and_aliases_are_known() -> None:
    model: Any = hf_model(architecture="GPT2LMHeadModel", **{**TINY, "bos_token_id": 3, "pad_token_id": 0})
    assert (model.config.bos_token_id, model.config.pad_token_id) == (3, 0)
    small = {name: size for name, size in TINY.items() if name != "n_embd"}
    assert hf_model(architecture="GPT2LMHeadModel", hidden_size=16, **small).config.n_embd == 16


def test_an_image_model() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model: Any = hf_model(architecture="ViTForImageClassification", image_size=8, patch_size=4, **sizes)
    assert model(torch.zeros(2, 3, 8, 8)).logits.shape == (2, 2)


def test_unknown_names_and_values_are_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="did you mean 'GPT2LMHeadModel'"):
        hf_model(architecture="GPT2LMHeadModl")
    with pytest.raises(UsageError, match="no architecture 'AutoModelForCausalLM'"):
        hf_model(architecture="AutoModelForCausalLM")
    with pytest.raises(UsageError, match=r"did you mean .*'n_layer'"):
        hf_model(architecture="GPT2LMHeadModel", n_layers=2)
    with pytest.raises(UsageError, match="does not take these values"):
        hf_model(architecture="GPT2LMHeadModel", **{**TINY, "n_layer": "two"})
    with pytest.raises(UsageError, match="does not take these values"):
        hf_model(architecture="GPT2LMHeadModel", **{**TINY, "n_head": 3})


def test_without_transformers_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match='pip install "transformers>='):
        hf_model()


def test_a_recipe_trains_a_classifier_of_transformers_on_images(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of classes comes from the dataset, and the logits from the output."""
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    args = {"architecture": "ViTForImageClassification", "image_size": 8, "patch_size": 4, "num_channels": 3, **sizes}
    shapes = {"use": "shapes", "args": {"size": 8, "count": 16}}
    recipe = {
        "until": "2steps",
        "model": {"use": "hf", "args": args},
        "data": {"train": shapes, "val": shapes},
        "batch": {"size": 8},
        "metrics": ["accuracy"],
        "log": {"doctor": False},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    result = train(load(path, environ={}), quiet=True)
    assert result.step == 2 and 0 <= result.metrics["accuracy"] <= 1
    assert result.state is not None and result.state.model.config.num_labels == 5
