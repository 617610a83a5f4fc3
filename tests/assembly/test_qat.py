"""Linear layers that round to integers in training: which, what they compute, and what is exported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trainwright as tw
from trainwright.assembly.linear_layers import integer_weights, note_of_rounding, round_linear_layers
from trainwright.commands.export import export
from trainwright.errors import RecipeError, UsageError
from trainwright.recipe import from_mapping
from trainwright.recipe.schema import Qat

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
WEIGHTS_ONLY = [Qat(weights="int8", inputs="none"), Qat(weights="int4", group_size=16, inputs="none")]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 4))


@pytest.mark.parametrize("settings", WEIGHTS_ONLY, ids=["int8", "int4"])
def test_the_forward_pass_rounds_and_the_gradient_passes_through(settings: Qat) -> None:
    reference, model, x = network(), network(), torch.randn(5, 8)
    parameters = list(model.parameters())
    done = round_linear_layers(model, settings)
    assert done.chosen == ("2",)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.state_dict().keys() == reference.state_dict().keys()
    [(_, integers, scale)] = integer_weights(model)
    with torch.no_grad():
        reference[2].weight.copy_((integers.view(*scale.shape, -1) * scale[..., None]).view_as(integers))
    assert torch.equal(model(x), reference(x))
    model(x).sum().backward()
    reference(x).sum().backward()
    inside = (integers > integers.min()) & (integers < integers.max())  # the gradient of a clipped weight is 0
    torch.testing.assert_close(model[2].weight.grad[inside], reference[2].weight.grad[inside])
    assert note_of_rounding(done, settings).choice.startswith("1 of 3 linear layers")


@pytest.mark.parametrize("settings", WEIGHTS_ONLY, ids=["int8", "int4"])
def test_integers_are_the_nearest_of_a_symmetric_range(settings: Qat) -> None:
    """The largest magnitude of a group is at the end of the range."""
    model, half = network(), 127.5 if settings.weights == "int8" else 7.5
    groups = model[2].weight.detach().view(48, -1, settings.group_size or 32)
    round_linear_layers(model, settings)
    [(_, integers, scale)] = integer_weights(model)
    torch.testing.assert_close(scale, groups.abs().amax(-1) / half)
    exact = groups / scale[..., None]
    assert ((integers.view_as(groups) - exact).abs() <= 0.5 + 1e-4).all()
    assert integers.min() == -half - 0.5 and integers.max() == half - 0.5


@pytest.mark.parametrize("settings", WEIGHTS_ONLY, ids=["int8", "int4"])
def test_integers_times_scales_are_the_bits_of_the_forward_pass(settings: Qat) -> None:
    model = network()
    round_linear_layers(model, settings)
    [(name, integers, scale)] = integer_weights(model)
    assert name == "2.weight" and integers.dtype == torch.int8
    used = model[2].weight_fake_quantizer(model[2].weight)
    assert torch.equal((integers.view(*scale.shape, -1) * scale[..., None]).view_as(used), used)


def test_inputs_are_rounded_too() -> None:
    model, weights_only, x = network(), network(), torch.randn(5, 8)
    round_linear_layers(model, Qat())
    round_linear_layers(weights_only, Qat(inputs="none"))
    assert not torch.equal(model(x), weights_only(x))
    torch.testing.assert_close(model(x), weights_only(x), atol=0.02, rtol=0.05)


def test_what_does_not_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match=r"model.qat.layers: 'blocks' matches no linear layer") as failed:
        round_linear_layers(network(), Qat(layers=("blocks",)))
    assert failed.value.remedy
    with pytest.raises(UsageError, match="leaves no layer: the first and the last layer: 0, 4; dimensions that are no"):
        round_linear_layers(network(), Qat(group_size=24))
    with pytest.raises(RecipeError, match="contradicts lora"):
        from_mapping(recipe(Path("runs"), lora={"rank": 2}))


def recipe(folder: Path, **more: object) -> dict[str, object]:
    model = {
        "use": "mlp",
        "args": {"sizes": [64, 32, 32, 10]},
        "qat": {"weights": "int4", "group_size": 16, "inputs": "none"},
    }
    return {
        "name": "qat",
        "folder": str(folder),
        "until": "20steps",
        "model": {**model, **more},
        "data": {"train": {"use": "digits", "args": {"split": "train"}}},
        "loss": "cross_entropy",
        "log": {"doctor": False},
    }


@pytest.mark.slow
def test_the_export_of_a_run_computes_what_was_trained(tmp_path: Path) -> None:
    """A plain model with the exported integers times scales has the logits of the trained model."""
    pytest.importorskip("sklearn")
    result = tw.train(from_mapping(recipe(tmp_path)), quiet=True)
    assert result.state is not None
    done = export(result.run, format="quantized")
    weights = load_file(done.path / "model.safetensors")
    [scaled] = [name for name in weights if name.endswith("_scale")]
    scale, integers = weights.pop(scaled), weights[scaled.removesuffix("_scale")]
    assert integers.dtype == torch.int8 and int(integers.abs().max()) <= 8
    weights[scaled.removesuffix("_scale")] = (integers.view(*scale.shape, -1) * scale[..., None]).view_as(integers)
    trained = result.state.model.eval()
    floats = load_file(export(result.run, format="safetensors").path / "model.safetensors")
    assert all(torch.equal(floats[name], value) for name, value in trained.state_dict().items())
    x = torch.rand(6, 64)
    with torch.no_grad():
        logits = trained(x)
        trained.load_state_dict(weights)
        for layer in trained.modules():
            if hasattr(layer, "weight_fake_quantizer"):
                layer.weight_fake_quantizer = None
        assert torch.equal(trained(x), logits)


@pytest.mark.slow
def test_a_run_that_did_not_round_has_no_such_export(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    result = tw.train(from_mapping(recipe(tmp_path, qat=None)), quiet=True)
    with pytest.raises(UsageError, match="did not round weights to integers"):
        export(result.run, format="quantized")
