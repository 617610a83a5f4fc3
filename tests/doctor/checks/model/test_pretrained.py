"""Checks of the origin of weights: lost layers of a pretrained model, and adapters on random weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.models.hf import hf_model
from trainwright.recipe import from_mapping
from trainwright.training.run import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None or find_spec("peft") is None, reason="needs transformers"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT asks transformers
]
MISSING = "model.pretrained_weights_missing"
GPT2 = {"architecture": "GPT2LMHeadModel", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16}
DATA = {"train": {"use": "python-topics", "args": {"split": "train", "block_size": 16}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def codes(model: dict[str, Any], loss: str) -> set[str]:
    recipe = {"until": "2steps", "batch": {"size": 4}, "model": model, "data": DATA, "loss": loss}
    return {each.code for each in train(from_mapping(recipe), quiet=True).findings}


def save_without(folder: Path, lost: tuple[str, ...], **sizes: Any) -> None:
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    model: Any = hf_model(**(sizes or {**GPT2, "vocab_size": 96}))
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    kept = {name: each for name, each in load_file(file).items() if not name.startswith(lost or ("-",))}
    save_file(kept, file, {"format": "pt"})


LLAMA = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ({"use": "hf", "args": GPT2, "lora": {"rank": 2}}, "hf_causal_lm"),
        (
            {"use": "gpt", "args": {"block_size": 16, "layers": 1, "heads": 2, "d_model": 16}, "lora": {}},
            "language_model",
        ),
    ],
    ids=["hf", "gpt"],
)
def test_adapters_on_random_weights(model: dict[str, Any], loss: str) -> None:
    assert MISSING in codes(model, loss)


def test_lost_layers_of_a_base(folder: Path) -> None:
    save_without(folder / "base", ("transformer.h.0.mlp",))
    assert MISSING in codes({"use": "hf", "name": "base"}, "hf_causal_lm")
    ids = torch.randint(0, 96, (8, 8))
    save_without(folder / "llama", ("lm_head", "model.norm"), **LLAMA)
    result = tw.fit("llama", {"input_ids": ids, "labels": ids}, batch=4, steps=2, quiet=True)
    assert MISSING in {each.code for each in result.findings}


def test_complete_files_with_adapters_and_a_new_head_are_silent(folder: Path) -> None:
    save_without(folder / "base", ())
    assert not codes({"use": "hf", "name": "base", "lora": {"rank": 2}}, "hf_causal_lm") & {MISSING}
    model = hf_model(name="base", architecture="GPT2ForSequenceClassification", num_labels=3, pad_token_id=0)
    data = {"input_ids": torch.randint(1, 96, (8, 8)), "labels": torch.arange(8) % 3}
    result = tw.fit(model, data, batch=4, steps=2, quiet=True)
    assert not {each.code for each in result.findings} & {MISSING}


def test_models_without_adapters_and_live_models_are_silent() -> None:
    assert not codes({"use": "hf", "args": GPT2}, "hf_causal_lm") & {MISSING}
    x = torch.randn(16, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    lora = {"model.lora": {"rank": 2, "targets": ["0"]}}
    result = tw.fit(model, (x, x), nn.MSELoss(), steps=2, settings=lora, quiet=True)
    assert not {each.code for each in result.findings} & {MISSING}
