"""Linear layers with weights of 4 bits: values, gradients, and adapters on top of them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from trainwright.assembly.adapters import (
    Linear4bit,
    add_adapters,
    config_of,
    full_weights,
    plain_weights,
    quantize_linear_layers,
)
from trainwright.errors import UsageError, import_optional
from trainwright.plan.trace.fake_tensors import fake_tensors
from trainwright.recipe import Lora

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")]
EACH_KIND = pytest.mark.parametrize("kind", ["nf4", "int4"])
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False), nn.Linear(64, 3)).to(dtype)


@EACH_DTYPE
def test_nf4_has_the_values_of_torchao(dtype: torch.dtype) -> None:
    model = layers(dtype)
    expected = [
        import_optional("torchao.quantization", needed_for="a test")
        .to_nf4(model[i].weight, 64, 128)
        .get_original_weight()
        for i in (0, 2)
    ]
    assert quantize_linear_layers(model, "nf4") == (["0", "2"], [])
    assert torch.equal(model[0].weight, expected[0]) and torch.equal(model[2].weight, expected[1])
    assert (
        sum(each.nbytes for each in model[0].parameters() if each is not model[0].bias) < 0.6 * model[0].weight.numel()
    )


@EACH_DTYPE
def test_int4_rounds_to_sixteen_levels_a_group(dtype: torch.dtype) -> None:
    model = layers(dtype)
    weight = model[0].weight.detach().clone()
    quantize_linear_layers(model, "int4")
    rounded = model[0].weight.view(128, 2, 32)
    step = weight.view(128, 2, 32).abs().amax(-1, keepdim=True).float() / 7
    assert ((rounded - weight.view(128, 2, 32)).abs().float() <= 1.1 * step).all()
    assert max(len(group.unique()) for row in rounded for group in row) <= 16


@EACH_KIND
def test_forward_and_gradient_are_those_of_the_full_weight(kind: str) -> None:
    model = layers()
    quantize_linear_layers(model, kind)
    plain = layers()
    plain.load_state_dict(full_weights(model.state_dict()))
    x = torch.randn(5, 64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [each(x) for each, x in zip((model, plain), inputs, strict=True)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs[0]).float().sum().backward()


@EACH_KIND
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_train_on_it_and_are_merged(kind: str, dora: bool) -> None:
    pytest.importorskip("peft")
    lora = Lora(rank=4, targets=("0", "2"), quantize=kind, dora=dora)  # type: ignore[arg-type]
    model, notes = add_adapters(layers(), lora)
    assert [(note.topic, note.choice) for note in notes] == [("quantized", f"2 linear layers, {kind}")]
    trained = [each for each in model.parameters() if each.requires_grad]
    assert len(trained) == (6 if dora else 4)
    x, y = torch.randn(16, 64), torch.randn(16, 3)
    optimizer, losses = torch.optim.Adam(trained, lr=0.01), []
    for _ in range(20):
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    merged = layers()
    merged.load_state_dict(plain_weights(model.state_dict(), config_of(lora)))
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-5)


@EACH_KIND
def test_under_fake_tensors_it_has_the_sizes_of_the_real_one(kind: str) -> None:
    real = layers()
    quantize_linear_layers(real, kind)
    with fake_tensors():
        simulated = layers()
        quantize_linear_layers(simulated, kind)
        assert simulated(torch.empty(2, 64)).shape == (2, 3)
    sizes = [
        {name: (each.shape, each.dtype) for name, each in model.state_dict().items()} for model in (real, simulated)
    ]
    assert sizes[0] == sizes[1]


def test_layers_that_cannot_be_quantized_stay() -> None:
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 40), nn.Linear(40, 3))
    assert quantize_linear_layers(model, "nf4") == (["0"], ["1"])
    assert isinstance(model[0], Linear4bit) and type(model[1]) is nn.Linear
    with pytest.raises(UsageError, match="multiple of 64"):
        quantize_linear_layers(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3)), "nf4")
