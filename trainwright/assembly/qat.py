"""Quantization-aware training: linear layers that round weights and inputs to integers, by torchao."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainwright.assembly.linear_layers import ChosenLayers, choose_linear_layers, replace_module
from trainwright.optim.torchao import torchao_module
from trainwright.plan.make import Note
from trainwright.recipe.schema import Qat

_NEEDED_FOR = "model.qat"
SCALE_SUFFIX = "_scale"
"""An exported weight ``NAME`` contains integers, and ``NAME_scale`` their multipliers."""


def round_linear_layers(model: nn.Module, settings: Qat) -> ChosenLayers:
    """Replace linear layers of ``model`` in place by layers that round in the forward pass (straight-through gradient).

    Parameters keep their identity, their names and their dtype.

    Raises:
        UsageError: A pattern matches no linear layer, or no layer is left.
        MissingExtra: torchao is not installed.
    """
    multiple = settings.group_size or 1
    found = choose_linear_layers(model, settings.layers, key="model.qat.layers", multiples=(multiple, 1))
    qat = torchao_module("quantization.qat", needed_for=_NEEDED_FOR)
    granularity = "per_channel" if settings.group_size is None else None
    weights = qat.IntxFakeQuantizeConfig(
        getattr(torch, settings.weights), granularity, group_size=settings.group_size, is_symmetric=True
    )
    inputs = None
    if settings.inputs == "int8":
        inputs = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    for name in found.chosen:
        layer = model.get_submodule(name)
        replace_module(model, name, qat.FakeQuantizedLinear.from_linear(layer, inputs, weights).train(layer.training))
    return found


def note_of_rounding(done: ChosenLayers, settings: Qat) -> Note:
    """Describe the replaced layers for the plan."""
    scales = "a scale a row" if settings.group_size is None else f"a scale per {settings.group_size} values"
    inputs = ", inputs int8" if settings.inputs == "int8" else ""
    how = f"{len(done.chosen)} of {done.total} linear layers: weights {settings.weights}, {scales}{inputs}"
    return Note("quantization-aware training", how, "; ".join(done.reasons()))


@torch.no_grad()
def integer_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, the integers (int8, as the weight) and the scales (rows, groups) of each rounded weight.

    Integers times scales are the bits that the forward pass multiplied with.
    """
    fake_quantized = torchao_module("quantization.qat", needed_for=_NEEDED_FOR).FakeQuantizedLinear
    for name, layer in model.named_modules():
        if isinstance(layer, fake_quantized):
            rounded = layer.weight_fake_quantizer(layer.weight)
            scale = layer.weight_fake_quantizer.scale.view(rounded.shape[0], -1)
            codes = (rounded.view(*scale.shape, -1) / scale[..., None]).round().to(torch.int8)
            yield f"{name}.weight", codes.view(rounded.shape), scale
