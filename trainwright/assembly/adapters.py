"""Adds the adapters of a recipe (LoRA) to a model, and merges adapters into the weights of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright.assembly.linear_layers import replace_module
from trainwright.errors import MissingExtra, Problem, RecipeError, UsageError, import_optional, listed
from trainwright.models.lora import add_lora, lora_config, merged_weights
from trainwright.models.pretrained import output_layer
from trainwright.plan.make import Note
from trainwright.recipe import Lora

NF4_BLOCK, NF4_SCALE_BLOCK, INT4_GROUP = 64, 256, 32
"""Weights per scale (nf4), scales per factor (nf4), and weights per scale (int4). Those of nf4 are as in QLoRA."""
CODES, SCALES, FACTORS, MEAN = "codes_4bit", "scales_4bit", "factors_4bit", "mean_4bit"
"""Names of the parameters of a 4-bit layer; only nf4 has ``factors`` and ``mean``.

They are not buffers, because the engine copies buffers so that it can repeat a step.
"""
_NEEDED_FOR = "model.lora.quantize"


class Linear4bit(nn.Linear):
    """A frozen linear layer whose weight is stored in 4 bits and dequantized in each forward and backward pass.

    ``weight`` is the full weight in the dtype of the original one. Two codes share a byte, the first in its high half.
    """

    def __init__(self, layer: nn.Linear, codes: Mapping[str, Tensor]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        for name, value in codes.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return full_weight(self._parameters)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return input @ weight.T + bias."""
        product: Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    """The matrix product; the backward pass computes the weight again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: Linear4bit) -> Tensor:  # noqa: A002
        ctx.layer, ctx.dtype = layer, input.dtype
        return F.linear(input, layer.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad @ ctx.layer.weight.to(grad.dtype)).to(ctx.dtype), None


def full_weight(parts: Mapping[str, Any]) -> Tensor:
    """Return the weight of a quantized layer from its parameters, in the dtype of the original weight."""
    codes, scales = parts[CODES], parts[SCALES]
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if _has_no_values(codes):  # a trace of the operators below would take minutes for a large model
        numbers: Tensor = codes.int()
        return numbers.new_empty(rows, columns, dtype=parts[MEAN].dtype if FACTORS in parts else scales.dtype)
    if FACTORS in parts:
        factors, mean = parts[FACTORS], parts[MEAN]
        blocks = scales.view(len(factors), -1) / factors.unsqueeze(-1)
        scale = blocks.flatten().to(mean.dtype) + mean
        values = _levels(codes.device).to(mean.dtype)
    else:
        scale = scales.flatten()
        values = torch.arange(-8, 8, device=codes.device, dtype=scales.dtype)
    pairs = torch.cartesian_prod(values, values)  # a row for each byte
    weight = F.embedding(codes.flatten().int(), pairs).view(len(scale), -1)
    return weight.mul_(scale.unsqueeze(-1)).view(rows, columns)


def _levels(device: torch.device) -> Tensor:
    """Return the 16 values of nf4: quantiles of the normal distribution, as torchao has them."""
    levels = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
    levels += [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
    return torch.tensor(levels, device=device)


def quantize_linear_layers(model: nn.Module, kind: str) -> tuple[list[str], list[str]]:
    """Replace the linear layers of ``model`` by 4-bit layers, in place, except for the output layer.

    Layers whose number of inputs is not a multiple of 64 (nf4) or 32 (int4) stay unchanged, and so do layers of a
    subclass of ``nn.Linear``. Returns the names of the replaced layers, and of the layers of unsuitable size.

    Raises:
        UsageError: No layer can be quantized.
        MissingExtra: torchao is not installed.
    """
    output = output_layer(model)
    layers = {name: each for name, each in model.named_modules() if type(each) is nn.Linear and each is not output}
    if output is None:
        layers = dict(list(layers.items())[:-1])
    multiple = NF4_BLOCK if kind == "nf4" else INT4_GROUP
    done, left = [], []
    for name, layer in layers.items():
        if layer.in_features % multiple:
            left.append(name)
            continue
        codes = _nf4(layer.weight.detach()) if kind == "nf4" else _int4(layer.weight.detach())
        replace_module(model, name, Linear4bit(layer, codes))
        done.append(name)
    if not done:
        raise UsageError(
            f"{type(model).__name__} has no nn.Linear whose inputs are a multiple of {multiple}, so that nothing can "
            f"be quantized to {kind}",
            remedy="leave model.lora.quantize out",
        )
    return done, left


def _nf4(weight: Tensor) -> dict[str, Tensor]:
    blocks = weight.numel() // NF4_BLOCK
    per_factor = math.gcd(blocks, NF4_SCALE_BLOCK)
    if _has_no_values(weight):
        scales, factors = (blocks, torch.int8), (blocks // per_factor, weight.dtype)
        made = {
            name: weight.new_empty(size, dtype=dtype) for name, (size, dtype) in ((SCALES, scales), (FACTORS, factors))
        }
        return {CODES: _empty_codes(weight), **made, MEAN: weight.new_empty(())}
    done = _to_nf4(weight.contiguous(), NF4_BLOCK, per_factor)
    codes = done.quantized_data.view(len(weight), -1)
    return {CODES: codes, SCALES: done.quantized_scalers, FACTORS: done.quantization_factor, MEAN: done.scaler_mean}


def _to_nf4(weight: Tensor, block: int, scale_block: int) -> Any:
    module = import_optional("torchao.quantization", needed_for=_NEEDED_FOR)
    if not hasattr(module, "to_nf4"):  # torchao before 0.16
        module = import_optional("torchao.dtypes.nf4tensor", needed_for=_NEEDED_FOR)
    return module.to_nf4(weight, block, scale_block)


def _int4(weight: Tensor) -> dict[str, Tensor]:
    """Quantize to -8..7 with one scale for each 32 weights of a row, symmetric."""
    rows, columns = weight.shape
    if _has_no_values(weight):
        return {CODES: _empty_codes(weight), SCALES: weight.new_empty(rows, columns // INT4_GROUP)}
    ao = import_optional("torchao.quantization.quant_primitives", needed_for=_NEEDED_FOR)
    how = {"quant_min": -8, "quant_max": 7}
    scales, zeros = ao.choose_qparams_affine(
        weight, ao.MappingType.SYMMETRIC, (1, INT4_GROUP), torch.int8, **how, scale_dtype=weight.dtype
    )
    codes = ao.quantize_affine(weight, (1, INT4_GROUP), scales, zeros, torch.int8, **how)
    nibbles = (codes + 8).to(torch.uint8).view(rows, columns // 2, 2)
    return {CODES: nibbles[..., 0] << 4 | nibbles[..., 1], SCALES: scales.view(rows, -1)}


def _empty_codes(weight: Tensor) -> Tensor:
    return weight.new_empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8)


def _has_no_values(weight: Tensor) -> bool:
    """Return True for fake tensors and tensors on the meta device."""
    return weight.is_meta or type(weight.data) is not Tensor


def full_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose 4-bit weights are full weights again, under the names of the original layers."""
    found = dict(weights)
    for name in weights:
        path, _, last = name.rpartition(".")
        if last == CODES:
            parts = {
                key: found.pop(f"{path}.{key}") for key in (CODES, SCALES, FACTORS, MEAN) if f"{path}.{key}" in found
            }
            found[f"{path}.weight"] = full_weight(parts)
    return found


def add_adapters(model: nn.Module, lora: Lora, *, is_simulated: bool = False) -> tuple[nn.Module, tuple[Note, ...]]:
    """Quantize the linear layers of ``model`` if the recipe requests it, add adapters, and return notes for the plan.

    ``is_simulated``: the weights have no values, so that an initialization that decomposes them is left out.

    Raises:
        UsageError: No layer can be quantized.
        RecipeError: A target matches nothing.
        MissingExtra: PEFT or torchao is not installed.
    """
    notes: tuple[Note, ...] = ()
    if lora.quantize != "none":
        done, left = quantize_linear_layers(model, lora.quantize)
        others = f" and layers whose inputs do not fill the blocks: {listed(left, 4)}" if left else ""
        notes = (Note("quantized", f"{len(done)} linear layers, {lora.quantize}", f"all but the output layer{others}"),)
    settings = lora.model_dump(exclude={"quantize"})
    try:
        return add_lora(model, **settings | ({"init": "default"} if is_simulated else {})), notes
    except MissingExtra:
        raise
    except UsageError as error:
        raise RecipeError(Problem("model.lora.targets", error.message, remedy=error.remedy)) from None


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
