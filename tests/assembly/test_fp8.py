"""Linear layers in 8-bit floating point: which are converted, and what they compute, by emulation."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from trainwright.assembly.linear_layers import MxLinear, convert_linear_layers, note_of
from trainwright.errors import RecipeError, UsageError
from trainwright.plan.devices import find_device, known_devices
from trainwright.plan.make import require_fp8
from trainwright.plan.trace.run_forecast import precision_on
from trainwright.recipe import from_mapping
from trainwright.recipe.schema import Fp8

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
E4M3_MAX = 448.0
EMULATED = Fp8(emulate=True)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 72), nn.Linear(72, 64), nn.Linear(64, 32)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("precision", "patterns", "converted"),
    [
        ("fp8", (), ("2",)),
        ("mxfp8", (), ("2",)),
        ("fp8", ("0", "[1-4]"), ("0", "2")),
        ("fp8", ("*",), ("0", "2", "5")),
    ],
)
def test_which_layers_are_converted(
    precision: Literal["fp8", "mxfp8"], patterns: tuple[str, ...], converted: tuple[str, ...]
) -> None:
    model = network()
    before = dict(model.named_parameters())
    settings = Fp8(emulate=True, layers=patterns)
    done = convert_linear_layers(model, precision, settings)
    assert done.chosen == converted
    assert [name for name, layer in model.named_children() if "Linear" in str(layer) and type(layer) is not nn.Linear]
    assert {name: id(each) for name, each in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    note = note_of(done, precision, settings)
    assert note.choice.startswith(f"{len(converted)} of 5 linear layers")
    assert f"no multiples of {16 if precision == 'fp8' else 32}: 3, 4" in note.why


def test_what_applies_to_no_layer_is_refused() -> None:
    with pytest.raises(UsageError, match="matches no linear layer") as failed:
        convert_linear_layers(network(), "fp8", Fp8(emulate=True, layers=("blocks.*",)))
    with pytest.raises(UsageError, match=r"fp8\.layers leaves no layer: the first and the last layer: 0, 1"):
        convert_linear_layers(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "fp8", EMULATED)
    assert failed.value.remedy


def rounded(x: Tensor, dims: int | None) -> Tensor:
    """To e4m3 with the largest value of each row, or of the tensor, at its end."""
    largest = x.abs().amax() if dims is None else x.abs().amax(dims, keepdim=True)
    scale = E4M3_MAX / largest
    if dims is not None:
        scale = scale.log2().floor().exp2()
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
def test_the_product_is_that_of_the_rounded_operands(scales: Literal["tensorwise", "rowwise"]) -> None:
    model = network()
    layer = model[2]  # type: ignore[index]
    convert_linear_layers(model, "fp8", Fp8(emulate=True, scales=scales))
    assert type(model[2]) is not nn.Linear  # type: ignore[index]
    x = torch.randn(8, 64) * torch.logspace(-2, 2, 8)[:, None]
    dims = None if scales == "tensorwise" else 1
    expected = rounded(x, dims) @ rounded(layer.weight.detach(), dims).T + layer.bias.detach()
    torch.testing.assert_close(model[2](x), expected, rtol=1e-5, atol=1e-5)  # type: ignore[index]
    assert not torch.allclose(expected, layer(x), rtol=1e-3, atol=1e-3)


def test_mx_rounds_blocks_of_32_values_with_a_power_of_two() -> None:
    model = network()
    layer = model[2]  # type: ignore[index]
    convert_linear_layers(model, "mxfp8", EMULATED)
    assert isinstance(model[2], MxLinear)  # type: ignore[index]
    x = torch.randn(32, 64) * torch.logspace(-2, 2, 32)[:, None]

    def blocks(values: Tensor) -> Tensor:
        scale = (values.view(-1, 32).abs().amax(1, keepdim=True) / E4M3_MAX).log2().ceil().exp2()
        return ((values.view(-1, 32) / scale).to(torch.float8_e4m3fn).float() * scale).view_as(values)

    expected = blocks(x) @ blocks(layer.weight.detach()).T + layer.bias.detach()
    torch.testing.assert_close(model[2](x), expected, rtol=1e-2, atol=1e-2)  # type: ignore[index]


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_gradients_are_near_those_of_bf16(precision: Literal["fp8", "mxfp8"]) -> None:
    plain = network()
    converted = copy.deepcopy(plain)
    convert_linear_layers(converted, precision, EMULATED)
    x = torch.randn(64, 32)
    for model in (plain, converted):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
    for one, other in zip(plain.parameters(), converted.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert other.grad.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(one.grad.flatten(), other.grad.flatten(), dim=0) > 0.99


RECIPE = {"model": "mlp", "data": {"train": "digits"}}


@pytest.mark.parametrize(
    ("device", "precision", "nearest"),
    [
        ("h100-80gb", "fp8", ""),
        ("b200-180gb", "mxfp8", ""),
        ("h100-80gb", "mxfp8", "fp8"),
        ("a100-80gb", "fp8", "bf16"),
        ("t4-16gb", "fp8", "fp16"),
    ],
)
def test_a_device_without_it_is_refused_with_the_nearest(device: str, precision: str, nearest: str) -> None:
    found = find_device(device, known_devices())
    recipe = from_mapping({**RECIPE, "precision": precision}).recipe
    if not nearest:
        assert precision_on(recipe, found) == precision
        return
    with pytest.raises(RecipeError, match=f"{device} does not compute {precision} in hardware") as failed:
        precision_on(recipe, found)
    assert f"precision: {nearest}" in failed.value.problems[0].remedy
    require_fp8(from_mapping({**RECIPE, "precision": precision, "fp8": {"emulate": True}}).recipe, device, ())
