"""Loops whose optimizer is not the one that the watch was given."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import trainwright as tw
from trainwright.runs.records import Found

X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3


def _steps(model: nn.Module, optimizer: Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


def _found(before: int, after: int) -> list[Found]:
    """Returns the findings of a loop that makes its optimizer again after ``before`` steps."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        _steps(model, optimizer, before)
        _steps(model, torch.optim.Adam(model.parameters()), after)
    return [each for each in watch.findings() if each.code == "loop.unseen"]


@pytest.mark.parametrize(("before", "after"), [(0, 12), (10, 20), (80, 120)], ids=["at once", "later", "light steps"])
def test_an_optimizer_that_the_loop_makes_again_is_a_warning(before: int, after: int) -> None:
    (found,) = _found(before, after)
    assert found.severity == "warning" and "create the optimizer once" in found.remedy
    assert str(found.where.source).startswith("test_unseen.py:")


def test_a_few_steps_of_another_optimizer_are_no_warning() -> None:
    assert [each.severity for each in _found(20, 5)] in ([], ["info"])
