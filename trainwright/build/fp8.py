"""Replaces linear layers by layers whose matrix products are computed in 8-bit floating point, by torchao."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainwright.build.torchao import torchao_module
from trainwright.errors import UsageError, suggest
from trainwright.plan.make import Note
from trainwright.recipe.schema import Fp8

BLOCK = {"fp8": 16, "mxfp8": 32}
"""Both dimensions of a layer must be multiples of this: of what tensor cores take, and of the values per MX scale."""
MAX_NAMES_SHOWN = 3


@dataclass(frozen=True)
class ConvertedLayers:
    """Names of the layers that were replaced, and those that were not, by the reason."""

    converted: tuple[str, ...]
    left_out: dict[str, tuple[str, ...]]


def convert_linear_layers(model: nn.Module, precision: Literal["fp8", "mxfp8"], settings: Fp8) -> ConvertedLayers:
    """Replace linear layers of ``model`` in place. Parameters keep their identity, their names and their dtype.

    Without patterns these are all ``nn.Linear`` but the first and the last, whose rounding costs the most accuracy.

    Raises:
        UsageError: A pattern matches no linear layer, or no layer is left to convert.
        MissingExtra: torchao is not installed.
    """
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    _require_matching(settings.layers, list(layers))
    left_out: dict[str, list[str]] = defaultdict(list)
    chosen = []
    for number, (name, layer) in enumerate(layers.items()):
        why = _why_left_out(name, layer, settings, BLOCK[precision], is_end=number in (0, len(layers) - 1))
        left_out[why].append(name) if why else chosen.append(name)
    if not chosen:
        raise UsageError(
            f"precision {precision} would apply to no layer: {'; '.join(_described(left_out)) or 'no nn.Linear'}",
            remedy="use precision: bf16, or name layers of other sizes by fp8.layers",
        )
    needed_for = f"precision {precision}"
    if precision == "fp8":
        _convert_fp8(model, frozenset(chosen), settings, needed_for)
    else:
        for name in chosen:
            _set_module(model, name, MxLinear(layers[name], _MxProduct.of(settings, needed_for)))
    return ConvertedLayers(tuple(chosen), {why: tuple(names) for why, names in left_out.items()})


def note_of(done: ConvertedLayers, precision: str, settings: Fp8) -> Note:
    """What was converted, and what was left out, for the plan."""
    scales = "a scale per 32 values" if precision == "mxfp8" else f"{settings.scales} scales"
    how = f"{scales}, emulated" if settings.emulate else scales
    left_out = "; ".join(["bf16 elsewhere", *_described(done.left_out)])
    total = len(done.converted) + sum(map(len, done.left_out.values()))
    return Note(precision, f"{len(done.converted)} of {total} linear layers, {how}", left_out)


def _require_matching(patterns: tuple[str, ...], names: list[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"fp8.layers: {pattern!r} matches no linear layer", remedy=suggest(pattern, names))


def _why_left_out(name: str, layer: nn.Linear, settings: Fp8, block: int, *, is_end: bool) -> str:
    if settings.layers and not any(fnmatchcase(name, pattern) for pattern in settings.layers):
        return "not named by fp8.layers"
    if not settings.layers and is_end:
        return "the first and the last layer"
    if layer.in_features % block or layer.out_features % block:
        return f"dimensions that are no multiples of {block}"
    return ""


def _described(left_out: dict[str, Any]) -> Iterator[str]:
    for why, names in left_out.items():
        shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
        yield f"{why}: {shown}"


def _convert_fp8(model: nn.Module, chosen: frozenset[str], settings: Fp8, needed_for: str) -> None:
    float8 = torchao_module("float8", needed_for=needed_for)
    config = replace(
        float8.Float8LinearConfig.from_recipe_name(settings.scales),
        emulate=settings.emulate,
        pad_inner_dim=not settings.emulate,  # a last batch may have any number of samples
    )
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)


@dataclass(frozen=True)
class _MxProduct:
    """torchao's matrix product of two tensors, which it casts to MXFP8; on CPU by emulation."""

    function: Any
    options: tuple[Any, ...]

    @classmethod
    def of(cls, settings: Fp8, needed_for: str) -> _MxProduct:
        function = torchao_module("prototype.moe_training.mxfp8_linear", needed_for=needed_for).mx_mm
        config = torchao_module("prototype.mx_formats.config", needed_for=needed_for)
        kernels = torchao_module("quantization.quantize_.common.kernel_preference", needed_for=needed_for)
        dim0, dim1, scale = (
            getattr(config, name)
            for name in ("MXFP8Dim0CastKernelChoice", "MXFP8Dim1CastKernelChoice", "ScaleCalculationMode")
        )
        if settings.emulate:
            how = (kernels.KernelPreference.EMULATED, dim0.TORCH, dim1.TORCH)
        else:
            how = (kernels.KernelPreference.AUTO, dim0.TRITON, dim1.CUDA)
        return cls(function, (*([torch.float8_e4m3fn] * 3), BLOCK["mxfp8"], *how, scale.RCEIL, False))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = self.function.apply(x, weight, *self.options)
        return product


class MxLinear(nn.Linear):
    """A linear layer that casts input, weight and gradient to MXFP8 (OCP Microscaling Formats specification, 2023).

    The weight itself stays in the dtype that it has.
    """

    def __init__(self, layer: nn.Linear, product: _MxProduct) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._product = product
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        out = self._product(x.to(dtype), self.weight.to(dtype))
        return out if self.bias is None else out + self.bias.to(out.dtype)


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
