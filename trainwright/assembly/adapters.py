"""Adapters of a recipe: adds them to a model, and merges them into weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainwright.assembly.quantized import full_weights, quantize_linear_layers
from trainwright.models.lora import add_lora, lora_config, merged_weights
from trainwright.models.pretrained import listed
from trainwright.plan.make import Note
from trainwright.recipe import Lora


def add_adapters(model: nn.Module, lora: Lora, *, is_simulated: bool = False) -> tuple[nn.Module, tuple[Note, ...]]:
    """Quantize the linear layers of ``model`` if the recipe requests it, add adapters, and return notes for the plan.

    ``is_simulated``: the weights have no values, so that an initialization that decomposes them is left out.

    Raises:
        UsageError: A target matches nothing, or no layer can be quantized.
        MissingExtra: PEFT or torchao is not installed.
    """
    notes: tuple[Note, ...] = ()
    if lora.quantize != "none":
        done, left = quantize_linear_layers(model, lora.quantize)
        others = f"not a multiple of its block: {listed(left)}" if left else "all but the output layer"
        notes = (Note("quantized", f"{len(done)} linear layers, {lora.quantize}", others),)
    settings = lora.model_dump(exclude={"quantize"})
    return add_lora(model, **settings | ({"init": "default"} if is_simulated else {})), notes


def plain_weights(weights: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the weights of the model without adapters and 4-bit layers, under the names of the base model.

    ``config`` are the fields of PEFT's configuration of the adapters; None if there are none.
    """
    full = full_weights(weights)
    return full if config is None else merged_weights(full, config)


def config_of(lora: Lora) -> dict[str, Any]:
    """Return the fields of PEFT's configuration for the adapters of a recipe."""
    settings = lora.model_dump(exclude={"quantize", "targets"})
    found: dict[str, Any] = lora_config([], **settings).to_dict()
    return found
