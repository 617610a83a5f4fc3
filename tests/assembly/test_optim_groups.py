"""Parameter groups: learning rate and weight decay of each parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainwright.errors import UsageError
from trainwright.optim.groups import GroupRule, param_groups
from trainwright.optim.muon import muon_groups


class Net(nn.Module):
    """A tied language model with every kind of norm, a convolution and a norm of two dimensions."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.layer_norm = nn.LayerNorm((4, 8))
        self.group_norm = nn.GroupNorm(2, 8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.instance_norm = nn.InstanceNorm1d(8, affine=True)
        self.rms_norm = nn.RMSNorm((4, 8))
        self.conv = nn.Conv1d(8, 8, 3)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


NO_DECAY: dict[str, Any] = {"decay_norms_and_biases": False}


def names_of(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: [names[id(p)] for p in group["params"]] for group in groups}


def test_norms_and_biases_do_not_decay_and_tied_weights_come_once() -> None:
    model = Net()
    groups = param_groups(model, lr=0.1, weight_decay=0.01, **NO_DECAY)
    assert names_of(model, groups) == {
        "decay": ["tokens.weight", "conv.weight", "hidden.weight"],
        "no_decay": [
            *(f"{kind}_norm.{each}" for kind in ("layer", "group", "batch", "instance") for each in ("weight", "bias")),
            "rms_norm.weight",
            "conv.bias",
            "hidden.bias",
        ],
    }
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.1, 0.01), (0.1, 0.0)]


def test_all_are_in_one_group_where_nothing_is_asked_for() -> None:
    model = Net()
    groups = param_groups(model, lr=0.1, weight_decay=0.01)
    assert names_of(model, groups) == {"decay": [name for name, _ in model.named_parameters()]}
    (group,) = param_groups(model, lr=None, weight_decay=None)
    assert group.keys() == {"name", "params"}, "the optimizer's own defaults count"


def test_a_rule_cannot_scale_a_learning_rate_that_is_not_known() -> None:
    with pytest.raises(UsageError, match="scales the learning rate, and none is given"):
        param_groups(Net(), lr=None, weight_decay=None, rules=[GroupRule("head.*", lr_scale=0.1)])


def test_frozen_parameters_are_left_out() -> None:
    model = Net()
    model.tokens.weight.requires_grad_(False)
    model.hidden.requires_grad_(False)
    members = names_of(model, param_groups(model, lr=0.1, weight_decay=0.01, **NO_DECAY))
    assert members["decay"] == ["conv.weight"] and "hidden.bias" not in members["no_decay"]
    with pytest.raises(UsageError, match="no trainable parameter"):
        param_groups(model.requires_grad_(False), lr=0.1, weight_decay=0.0)


def test_the_first_matching_rule_wins_and_any_tied_name_matches() -> None:
    model = Net()
    rules = [
        GroupRule("head.*", lr=0.5),  # the embedding's other name
        GroupRule("hidden.bias", weight_decay=0.3),
        GroupRule("hidden.*", lr_scale=0.1),
    ]
    groups = param_groups(model, lr=0.1, weight_decay=0.01, rules=rules, **NO_DECAY)
    members = names_of(model, groups)
    assert members["decay lr=0.5"] == ["tokens.weight"]
    assert members["no_decay"][-1] == "conv.bias"
    assert members["decay weight_decay=0.3"] == ["hidden.bias"]
    assert members["decay lr=0.01"] == ["hidden.weight"]
    assert len(members) == len(groups) == 5


def test_a_rule_that_matches_nothing_is_an_error_with_the_nearest_name() -> None:
    model = Net()
    for pattern, near in (("hiden.weight", "'hidden.weight'"), ("*.wieght", "'*.weight'"), ("hiden.*", "'hidden.*'")):
        with pytest.raises(UsageError, match="matches no parameter") as caught:
            param_groups(model, lr=0.1, weight_decay=0.0, rules=[GroupRule(pattern)])
        assert near in caught.value.remedy
    model.conv.requires_grad_(False)
    with pytest.raises(UsageError, match="only frozen"):
        param_groups(model, lr=0.1, weight_decay=0.0, rules=[GroupRule("conv.*")])


def test_muon_gets_the_hidden_matrices_and_comes_first() -> None:
    for tied in (True, False):
        model = Net(tied)
        groups = muon_groups(model, lr=0.02, weight_decay=0.1, adamw={"lr": 1e-3}, **NO_DECAY)
        members = names_of(model, groups)
        assert members["muon decay"] == ["conv.weight", "hidden.weight"]
        assert members["adamw decay"] == ["tokens.weight"] + ([] if tied else ["head.weight"])
        assert groups[0]["algorithm"] == "muon" and groups[0]["lr"] == 0.02
        assert {group["lr"] for group in groups[1:]} == {1e-3}


def test_the_head_of_muon_can_be_named() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3))

    def hidden(head: str | None) -> list[str]:
        return names_of(model, muon_groups(model, lr=0.02, weight_decay=0.0, head=head))["muon no_decay"]

    assert hidden(None) == ["0.weight", "1.weight"]
    assert hidden("0.*") == ["1.weight", "2.weight"]
    assert hidden("") == ["0.weight", "1.weight", "2.weight"]
    with pytest.raises(UsageError, match="head='3"):
        hidden("3.weight")


def test_a_single_row_is_no_matrix_for_muon() -> None:
    model = nn.Module()
    model.position = nn.Parameter(torch.zeros(1, 16, 8))
    model.mix = nn.Parameter(torch.zeros(8, 8))
    assert names_of(model, muon_groups(model, lr=0.02, weight_decay=0.0)) == {
        "muon no_decay": ["mix"],
        "adamw no_decay": ["position"],
    }
