"""Paths of modules and parameters, as the author of the model writes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.checkpoint.names import named_modules, named_parameters


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_one_model_has_no_prefix() -> None:
    assert [path for path, _ in named_modules([net()])] == ["", "0", "1"]


def test_a_loss_without_parameters_does_not_number_the_model() -> None:
    roots = [net(), nn.CrossEntropyLoss()]
    assert [path for path, _ in named_modules(roots)] == ["", "0", "1", "CrossEntropyLoss"]
    assert [path for path, _ in named_parameters(roots)] == ["0.weight", "0.bias"]


def test_several_models_are_numbered() -> None:
    assert [path for path, _ in named_modules([net(), nn.Linear(1, 1)])] == ["0", "0.0", "0.1", "1"]
    assert [path for path, _ in named_modules([nn.ReLU(), nn.Tanh()])] == ["0", "1"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch._dynamo, when it is imported
def test_what_wraps_a_module_is_not_in_its_path() -> None:
    inner = net()
    inner[0] = torch.compile(inner[0])  # type: ignore[assignment]
    by_path = dict(named_modules([torch.compile(inner)]))  # type: ignore[list-item]
    assert list(by_path) == ["", "0", "1"]
    assert by_path[""] is inner and isinstance(by_path["0"], nn.Linear), "not the wrapper"
    assert [path for path, _ in named_parameters([inner])] == ["0.weight", "0.bias"]
