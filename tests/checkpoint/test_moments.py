"""Optimizer state finds its parameters by name, whatever became of the groups."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainwright.checkpoint.codec import encode
from trainwright.checkpoint.moments import load_moments, moments, parameter_names
from trainwright.engine.step import set_lr


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def trained(model: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + number)).square().sum().backward()
        optimizer.step()


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a == b


def assert_same_moments(one: Optimizer, one_model: nn.Module, other: Optimizer, other_model: nn.Module) -> None:
    first, second = moments(one_model, one)["state"], moments(other_model, other)["state"]
    for name in first.keys() & second.keys():
        assert first[name].keys() == second[name].keys()
        assert all(same(first[name][key], second[name][key]) for key in first[name]), name


def test_names_as_the_model_has_them() -> None:
    model, stray = net(), nn.Parameter(torch.zeros(2))
    optimizer = SGD([{"params": [model[2].bias, stray]}, {"params": [model[0].weight]}], lr=0.1)
    assert parameter_names(model, optimizer) == ["2.bias", "#1", "0.weight"]
    assert [group["params"] for group in moments(model, optimizer)["param_groups"]] == [["2.bias", "#1"], ["0.weight"]]


def test_groups_that_are_cut_otherwise() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    trained(model, optimizer)
    other = copy.deepcopy(model)
    cut = AdamW([{"params": [other[2].bias, other[0].bias], "weight_decay": 0.0}, {"params": [other[0].weight]}], lr=1)
    load_moments(other, cut, moments(model, optimizer))
    assert_same_moments(optimizer, model, cut, other)
    assert [group["weight_decay"] for group in cut.param_groups] == [0.0, 0.01]
    assert len(cut.state) == 3


def test_what_is_trained_anew_begins_without_moments() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    trained(model, optimizer)
    other = net()
    resumed = AdamW(other.parameters(), lr=1e-2)
    load_moments(other, resumed, moments(model, optimizer))
    assert set(moments(other, resumed)["state"]) == {"2.weight", "2.bias"}
    trained(other, resumed)
    assert len(resumed.state) == 4


def test_another_optimizer_is_refused() -> None:
    model = net()
    saved = moments(model, AdamW(model.parameters()))
    with pytest.raises(ValueError, match="AdamW, not of Adam"):
        load_moments(model, Adam(model.parameters()), saved)


class Counting(SGD):
    """Keeps a counter in its group, as schedule-free optimizers do, beside an option of its own."""

    def __init__(self, params: object, lr: float = 0.1, power: float = 2.0) -> None:
        super().__init__(params, lr=lr)  # type: ignore[arg-type]
        self.defaults |= {"power": power, "k": 0}
        for group in self.param_groups:
            group.update(power=power, k=0)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["k"] += 1


def test_counters_go_on_and_options_are_as_built() -> None:
    model = net()
    optimizer = Counting(model.parameters())
    trained(model, optimizer, steps=7)
    for power in (2.0, 3.0):
        resumed = Counting(model.parameters(), lr=0.5, power=power)
        load_moments(model, resumed, moments(model, optimizer))
        group = resumed.param_groups[0]
        assert (group["k"], group["power"], group["lr"]) == (7, power, 0.5)


def test_the_rate_of_a_schedule_is_no_part_of_the_state() -> None:
    """It follows from the step: a save in mid-step, or right after a resume, holds what one after the step holds."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    set_lr(optimizer, 0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = moments(model, optimizer)
    assert [group["lr"] for group in saved["param_groups"]] == [0.1]
    set_lr(optimizer, 0.25)  # of the next step
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    load_moments(model, fresh, saved)
    for after in (optimizer, fresh):
        assert encode(moments(model, after))[1] == encode(saved)[1]
