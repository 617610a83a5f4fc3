"""The average of the weights against its formula, and the weights that it swaps in."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from trainwright.checkpoint.average import Ema, NoAverage, Swa
from trainwright.checkpoint.codec import same_bits
from trainwright.errors import UsageError


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    return model


def train(model: nn.Module, ema: Ema | NoAverage, steps: int) -> list[dict[str, torch.Tensor]]:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.arange(5)), torch.arange(5)).backward()
        optimizer.step()
        ema.update()
        history.append({name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad})
    return history


def test_it_is_the_formula_with_its_warm_up() -> None:
    model = tied()
    expected = {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}
    ema = Ema(model, 0.7)
    for count, weights in enumerate(train(model, ema, 30)):
        decay = min(0.7, (1 + count) / (10 + count))
        expected = {name: decay * value + (1 - decay) * weights[name] for name, value in expected.items()}
    assert set(ema.shadow) == {"0.weight", "1.weight"}  # tied once, frozen not at all
    for name, value in expected.items():
        torch.testing.assert_close(ema.shadow[name].double(), value, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(value, weights[name], atol=1e-3)


def test_swapped_shows_the_average_and_brings_the_bits_back() -> None:
    model = tied()
    ema = Ema(model, 0.9)
    train(model, ema, 5)
    live = copy.deepcopy(dict(model.named_parameters()))
    average = {name: shadow.clone() for name, shadow in ema.shadow.items()}
    with ema.swapped():
        assert all(same_bits(model.get_parameter(name), shadow) for name, shadow in average.items())
        assert not same_bits(model.get_parameter("0.weight"), live["0.weight"])
        assert model[2].weight is model[0].weight
    assert all(same_bits(p, live[name]) for name, p in model.named_parameters())
    assert all(same_bits(ema.shadow[name], shadow) for name, shadow in average.items())
    try:
        with ema.swapped():
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert all(same_bits(p, live[name]) for name, p in model.named_parameters())
    train(model, ema, 1)  # the optimizer still updates the live weights
    assert not same_bits(model.get_parameter("0.weight"), live["0.weight"])


def test_it_leaves_the_weights_alone() -> None:
    averaged, plain = tied(), tied()
    train(averaged, Ema(averaged, 0.9), 5)
    train(plain, NoAverage(), 5)
    assert all(same_bits(a, b) for a, b in zip(averaged.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("decay", [0.0, 1.0, 1.5, -0.1, float("nan")])
def test_a_decay_that_averages_nothing(decay: float) -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        Ema(nn.Linear(1, 1), decay)


def test_the_mean_is_that_of_torch_and_by_hand() -> None:
    model = tied()
    swa, of_torch = Swa(model, start=3, every=2), AveragedModel(tied())
    optimizer, kept = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), []
    for step in range(1, 9):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.arange(5)), torch.arange(5)).backward()
        optimizer.step()
        swa.update(step)
        if step in (3, 5, 7):
            of_torch.update_parameters(model)
            kept.append(model[1].weight.detach().double())
    assert swa.num_updates == 3 and set(swa.shadow) == {"0.weight", "1.weight"}
    assert all(same_bits(shadow, of_torch.module.get_parameter(name)) for name, shadow in swa.shadow.items())
    torch.testing.assert_close(swa.shadow["1.weight"].double(), torch.stack(kept).mean(0), rtol=1e-6, atol=1e-7)


def test_an_average_of_another_kind_is_not_continued() -> None:
    model = tied()
    ema = Ema(model, 0.9)
    train(model, ema, 3)
    swa = Swa(model, start=1, every=1)
    swa.load_state_dict(ema.state_dict())
    assert swa.num_updates == 0 and not swa.is_complete
    assert all(same_bits(shadow, model.get_parameter(name)) for name, shadow in swa.shadow.items())


def test_the_statistics_are_those_of_the_newest_weights_until_they_are_measured() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    swa = Swa(model, start=1, every=1)
    for step in (1, 2):
        model(torch.randn(8, 4))
        swa.update(step)
    assert not swa.is_complete
    live = model[0].running_mean.clone()
    assert same_bits(swa.shadow["0.running_mean"], live)
    model(torch.randn(8, 4))
    with swa.swapped():
        assert same_bits(model[0].running_mean, live)
    assert not same_bits(model[0].running_mean, live)
