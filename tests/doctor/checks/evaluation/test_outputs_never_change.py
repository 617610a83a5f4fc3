"""Evaluations of another model than the trained one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw

Evaluated = Callable[[nn.Module, nn.Module], list[nn.Module]]


def rebuilt(base: nn.Module, model: nn.Module) -> list[nn.Module]:
    return [copy.deepcopy(base)]


def kept_copy(base: nn.Module, model: nn.Module) -> list[nn.Module]:
    return [base]


def trained(base: nn.Module, model: nn.Module) -> list[nn.Module]:
    return [model]


def loaded(base: nn.Module, model: nn.Module) -> list[nn.Module]:
    base.load_state_dict(model.state_dict())
    return [base]


def both(base: nn.Module, model: nn.Module) -> list[nn.Module]:
    return [base, model]


@pytest.mark.parametrize("lr", [0.1, 0.0])
@pytest.mark.parametrize(
    ("evaluated", "is_found"),
    [(rebuilt, True), (kept_copy, True), (trained, False), (loaded, False), (both, False)],
)
def test_outputs_never_change(evaluated: Evaluated, is_found: bool, lr: float) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.randint(3, (64,))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    base = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for step in range(24):
            rows = torch.randint(64, (16,))
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 6 == 5:
                for each in evaluated(base, model):
                    each.eval()
                    with torch.no_grad():
                        F.cross_entropy(each(x), y)
                model.train()
    assert watch.session.failures == []
    found = [each for each in watch.findings() if each.code == "evaluation.outputs_never_change"]
    assert bool(found) == (is_found and lr > 0)
