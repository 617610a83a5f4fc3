"""Linear layers that train in fp8 or MXFP8: which layers are converted, and their conversion by torchao."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainwright.errors import UsageError, import_optional, suggest
from trainwright.plan.make import Note
from trainwright.recipe.schema import Fp8

MAX_NAMES_SHOWN = 3


@dataclass(frozen=True)
class ChosenLayers:
    """Names of the chosen layers, and names of the skipped layers by reason."""

    chosen: tuple[str, ...]
    left_out: dict[str, tuple[str, ...]]

    @property
    def total(self) -> int:
        """Number of linear layers of the model."""
        return len(self.chosen) + sum(map(len, self.left_out.values()))

    def reasons(self) -> Iterator[str]:
        """Yield a phrase for each reason, with names of the layers."""
        for why, names in self.left_out.items():
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
            yield f"{why}: {shown}"


def _choose_linear_layers(model: nn.Module, patterns: Sequence[str], multiple: int) -> ChosenLayers:
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise UsageError(f"fp8.layers: {pattern!r} matches no linear layer", remedy=suggest(pattern, layers))
    left_out: dict[str, list[str]] = defaultdict(list)
    chosen = []
    for number, (name, layer) in enumerate(layers.items()):
        if patterns and not any(fnmatchcase(name, pattern) for pattern in patterns):
            left_out["not named by fp8.layers"].append(name)
        elif not patterns and number in (0, len(layers) - 1):
            left_out["the first and the last layer"].append(name)
        elif layer.in_features % multiple or layer.out_features % multiple:
            left_out[f"dimensions that are no multiples of {multiple}"].append(name)
        else:
            chosen.append(name)
    found = ChosenLayers(tuple(chosen), {why: tuple(names) for why, names in left_out.items()})
    if not chosen:
        raise UsageError(
            f"fp8.layers leaves no layer: {'; '.join(found.reasons()) or 'the model has no nn.Linear'}",
            remedy="name layers of other sizes by fp8.layers, or leave it out",
        )
    return found


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule ``name`` by ``module``."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


BLOCK_SIZE = {"fp8": 16, "mxfp8": 32}
"""Both dimensions of a layer must be multiples of this: the tile of tensor cores, or the values per MX scale."""


def convert_linear_layers(model: nn.Module, precision: Literal["fp8", "mxfp8"], settings: Fp8) -> ChosenLayers:
    """Replace linear layers of ``model`` in place. Parameters keep their identity, their names and their dtype.

    Without patterns these are all ``nn.Linear`` except the first and the last, whose rounding costs the most accuracy.

    Raises:
        UsageError: A pattern matches no linear layer, or no layer is left to convert.
        MissingExtra: torchao is not installed.
    """
    found = _choose_linear_layers(model, settings.layers, BLOCK_SIZE[precision])
    needed_for = f"precision {precision}"
    if precision == "fp8":
        _convert_fp8(model, frozenset(found.chosen), settings, needed_for)
    else:
        for name in found.chosen:
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            replace_module(model, name, MxLinear(layer, _MxProduct.of(settings, needed_for)))
    return found


def note_of(done: ChosenLayers, precision: str, settings: Fp8) -> Note:
    """Describe the converted and the skipped layers, for the plan."""
    scales = "a scale per 32 values" if precision == "mxfp8" else f"{settings.scales} scales"
    how = f"{scales}, emulated" if settings.emulate else scales
    left_out = "; ".join(["bf16 elsewhere", *done.reasons()])
    return Note(precision, f"{len(done.chosen)} of {done.total} linear layers, {how}", left_out)


def _convert_fp8(model: nn.Module, chosen: frozenset[str], settings: Fp8, needed_for: str) -> None:
    float8 = import_optional("torchao.float8", needed_for=needed_for)
    config = replace(
        float8.Float8LinearConfig.from_recipe_name(settings.scales),
        emulate=settings.emulate,
        pad_inner_dim=not settings.emulate,  # a last batch may have any number of samples
    )
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)


@dataclass(frozen=True)
class _MxProduct:
    """torchao's matrix product of two tensors, which are cast to MXFP8; on CPU by emulation."""

    function: Any
    options: tuple[Any, ...]

    @classmethod
    def of(cls, settings: Fp8, needed_for: str) -> _MxProduct:
        function = import_optional("torchao.prototype.moe_training.mxfp8_linear", needed_for=needed_for).mx_mm
        config = import_optional("torchao.prototype.mx_formats.config", needed_for=needed_for)
        kernels = import_optional("torchao.quantization.quantize_.common.kernel_preference", needed_for=needed_for)
        dim0, dim1, scale = (
            getattr(config, name)
            for name in ("MXFP8Dim0CastKernelChoice", "MXFP8Dim1CastKernelChoice", "ScaleCalculationMode")
        )
        if settings.emulate:
            how = (kernels.KernelPreference.EMULATED, dim0.TORCH, dim1.TORCH)
        else:
            how = (kernels.KernelPreference.AUTO, dim0.TRITON, dim1.CUDA)
        return cls(function, (*([torch.float8_e4m3fn] * 3), BLOCK_SIZE["mxfp8"], *how, scale.RCEIL, False))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = self.function.apply(x, weight, *self.options)
        return product


class MxLinear(nn.Linear):
    """A linear layer that casts input, weight and gradient to MXFP8 (OCP Microscaling Formats specification, 2023).

    The weight itself keeps its dtype.
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
