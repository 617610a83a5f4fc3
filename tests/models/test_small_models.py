"""ResNet, LSTM and MLP: parameter counts, shapes, independence of samples and positions, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainwright.errors import UsageError
from trainwright.models.generate import generate
from trainwright.models.lstm import lstm
from trainwright.models.mlp import mlp
from trainwright.models.resnet import BasicBlock, resnet


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (32, 464_154), (56, 853_018)])
def test_resnets_have_the_published_number_of_parameters(depth: int, parameters: int) -> None:
    model = resnet(depth=depth)
    assert count(model) == parameters
    assert len(model.blocks) == (depth - 2) // 2


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 32), (3, 33)])
def test_resnet_takes_digits_and_photographs(channels: int, side: int) -> None:
    model = resnet(depth=8, classes=7, channels=channels, width=4)
    logits_BK = model(torch.randn(2, channels, side, side))
    assert logits_BK.shape == (2, 7)
    logits_BK.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_option_a_shortcut_keeps_every_second_pixel_and_pads_channels_with_zeros() -> None:
    block = BasicBlock(2, 4, stride=2).eval()
    nn.init.zeros_(block.norm2.weight)  # the branch is then zero
    x_BCHW = torch.rand(1, 2, 6, 6)
    out = block(x_BCHW)
    assert torch.equal(out[:, 1:3], x_BCHW[:, :, ::2, ::2])
    assert not out[:, 0].any() and not out[:, 3].any()


@pytest.mark.parametrize("tied", [True, False])
def test_lstm_is_causal_and_ties_its_head(tied: bool) -> None:
    torch.manual_seed(0)
    model = lstm(vocab_size=11, d_model=8, layers=2, dropout=0.3, tied=tied).eval()
    nn.init.normal_(model.head.weight)
    ids = torch.randint(0, 11, (2, 9))
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(ids), model(changed)
    assert before.shape == (2, 9, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5], atol=1e-4)
    assert (model.head.weight is model.tokens.weight) is tied
    # embedding and head, and per layer 4 gates of two matrices and two biases
    assert count(model) == (1 if tied else 2) * 11 * 8 + 2 * 4 * (2 * 8 * 8 + 2 * 8)


def test_lstm_of_one_layer_takes_dropout_without_a_warning_and_generates() -> None:
    model = lstm(vocab_size=11, d_model=8, layers=1, dropout=0.5)
    assert generate(model, torch.zeros(1, 1, dtype=torch.int64), tokens=5).shape == (1, 6)


def test_mlp_is_the_formula() -> None:
    torch.manual_seed(0)
    model = mlp(sizes=[12, 5, 3], activation="tanh")
    x = torch.randn(4, 3, 2, 2)
    first, head = model.layers.linear0, model.layers.head
    assert isinstance(first, nn.Linear) and isinstance(head, nn.Linear)
    expected = (x.flatten(1) @ first.weight.T + first.bias).tanh() @ head.weight.T + head.bias
    torch.testing.assert_close(model(x), expected)
    assert count(model) == 12 * 5 + 5 + 5 * 3 + 3
    assert count(mlp(sizes=[4, 2])) == 10


@pytest.mark.parametrize(
    ("factory", "options", "said"),
    [
        (resnet, {"depth": 21}, "try 20 or 26"),
        (resnet, {"classes": 0}, "classes must be a whole number"),
        (lstm, {"vocab_size": 0}, "vocab_size must be"),
        (lstm, {"vocab_size": 9, "dropout": 1.0}, "dropout must be"),
        (mlp, {"sizes": [3]}, "two or more"),
        (mlp, {"sizes": [3, 0]}, "two or more"),
        (mlp, {"sizes": [3, 2], "activation": "rulu"}, "did you mean 'relu'"),
    ],
)
def test_wrong_options_are_refused_with_a_remedy(factory: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        factory(**options)
    assert caught.value.remedy
