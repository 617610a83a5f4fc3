"""The comparison of full fine-tuning, LoRA and QLoRA on devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.plan.devices import known_devices
from trainwright.plan.trace.blueprint import make_blueprint
from trainwright.plan.trace.finetuning import MethodForecast, _resized, forecast_methods
from trainwright.plan.trace.layouts import LayoutSurvey
from trainwright.recipe import from_mapping

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None or find_spec("peft") is None, reason="needs transformers"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT asks transformers
]
DATA = """\
import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        ids = torch.full((48,), index)
        return {"input_ids": ids, "labels": ids}
"""
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
RTX4090 = known_devices()["rtx4090"]


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder. The weights in base/ cannot be read: a plan does not need them."""
    folder = tmp_path_factory.mktemp("planned")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, **SIZES}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        sys.modules.pop("rows", None)
        (folder / "rows.py").write_text(DATA)
        (folder / "base").mkdir()
        (folder / "base" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
        (folder / "base" / "model.safetensors").write_bytes(b"")
        yield folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, MethodForecast]:
    loaded = from_mapping(recipe(lora={"rank": 4, "targets": "all-linear"}))
    return {each.method: each for each in forecast_methods(loaded, RTX4090)}


def recipe(**model: Any) -> dict[str, Any]:
    base = {"use": "hf", "name": "base", **model}
    data = {"train": {"use": "rows:Rows"}}
    return {"name": "it", "until": "2ep", "model": base, "data": data, "loss": "of_model", "batch": {"size": 8}}


def test_memory_and_trained_weights_of_each_method(found: dict[str, MethodForecast]) -> None:
    assert list(found) == ["full", "LoRA", "QLoRA"]
    adapters = 4 * (4 * (128 + 128) + 3 * (128 + 256))
    assert found["LoRA"].trainable == found["QLoRA"].trainable == adapters
    resident = {name: each.layout.scaled.small.resident for name, each in found.items()}
    weights = {name: each["weights"] for name, each in resident.items()}
    frozen = found["full"].trainable
    rounding = 30 * 512  # each tensor takes a multiple of 512 bytes
    assert weights["full"] == pytest.approx(4 * frozen, abs=rounding)
    assert weights["LoRA"] == pytest.approx(2 * frozen + 4 * adapters, abs=2 * rounding)
    linear = 4 * 128 * 128 + 3 * 128 * 256
    assert weights["QLoRA"] == pytest.approx(weights["LoRA"] - (2 - 33 / 64) * linear, abs=2 * rounding)
    assert resident["full"]["optimizer"] == pytest.approx(8 * frozen, abs=3 * rounding)
    assert resident["LoRA"]["optimizer"] == resident["QLoRA"]["optimizer"]
    assert found["LoRA"].steps == 10 and found["LoRA"].tokens == 48 and found["LoRA"].max_tokens == 4096


def test_the_memory_of_other_lengths_follows_from_two_traces(found: dict[str, MethodForecast]) -> None:
    variant = from_mapping(recipe(dtype="bf16", lora={"rank": 4, "targets": "all-linear"}))
    blueprint = make_blueprint(variant)
    survey = LayoutSurvey(replace(blueprint, sample=_resized(blueprint.sample, 3072)), RTX4090, "bf16")
    trace = survey.trace(1, chunked=False, checkpointing=survey.checkpointing("block"))
    assert found["LoRA"].at(3072, RTX4090).peak_bytes == pytest.approx(trace.peak.total, rel=0.15)


def test_the_longest_sequence_fits_and_a_longer_one_does_not(found: dict[str, MethodForecast]) -> None:
    each = found["LoRA"]
    least = each.at(2048, RTX4090).peak_bytes
    small = RTX4090.with_memory(int((least + (600 << 20)) / 0.95) + (1 << 20))
    longest = each.longest(small)
    assert 2048 <= longest < 4096
    assert each.at(longest, small).fits and not each.at(longest + 64, small).fits
    assert each.longest(RTX4090) == 4096 and each.longest(RTX4090.with_memory(1 << 20)) == 0


def test_the_command_prints_both_tables(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe()))
    mine = {"mine": {"memory": "24GiB", "bandwidth": 1e12, "flops": {"fp32": 8e13, "bf16": 1.6e14}, "price": 0.5}}
    (folder / "devices.yaml").write_text(yaml.safe_dump(mine))
    arguments = ["plan", "recipe.yaml", "--device", "RTX-4090", "--devices", "devices.yaml"]
    text = CliRunner().invoke(app, arguments).output
    assert "fine-tuning on rtx4090" in text and "4,096 (the model's limit)" in text
    assert "time and price of 10 steps of 8 sequences" in text
    assert "(OpenRelay, 2026-09-20)" in text and "(devices.yaml)" in text


def test_the_settings_of_each_method_load(found: dict[str, MethodForecast]) -> None:
    for each in found.values():
        changed = from_mapping(recipe(lora={"rank": 4}), overrides=each.settings).recipe.model
        assert (changed.lora is not None) == (each.method != "full")
        assert each.method != "QLoRA" or (changed.lora is not None and changed.lora.quantize == "nf4")


def test_each_price_is_dated() -> None:
    priced = [each for each in known_devices().values() if each.price is not None]
    assert len(priced) > 5 and all("2026-" in each.priced for each in priced)
