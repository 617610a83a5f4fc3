"""A copy of the weights is found wherever the variables of the loop lead to it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.doctor.measure.averages import FOLLOWED_STEPS, SEARCH_STEP
from trainwright.runs.records import Examined

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second
Shadow = dict[str, Tensor]


def in_a_closure(model: nn.Module, shadow: Shadow) -> Callable[[], None]:
    return lambda: follow(model, shadow)


def in_a_default(model: nn.Module, shadow: Shadow) -> Callable[[], None]:
    def update(shadow: Shadow = shadow) -> None:
        follow(model, shadow)

    return update


class InAnObjectInAList:
    def __init__(self, model: nn.Module, shadow: Shadow) -> None:
        self.model, self.callbacks = model, [SimpleNamespace(average=SimpleNamespace(shadow=shadow))]

    def __call__(self) -> None:
        follow(self.model, self.callbacks[0].average.shadow)


def follow(model: nn.Module, shadow: Shadow) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shadow[name].lerp_(parameter, 0.1)


@pytest.mark.parametrize("hold", [in_a_closure, in_a_default, InAnObjectInAList])
def test_a_copy_is_found(hold: Callable[[nn.Module, Shadow], Callable[[], None]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    held = hold(model, {name: p.detach().clone() for name, p in model.named_parameters()})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for _ in range(SEARCH_STEP + FOLLOWED_STEPS + 1):
            optimizer.zero_grad()
            F.cross_entropy(model(x.clone()), y).backward()
            optimizer.step()
            held()
    facts = [each.values for each in watch.records if isinstance(each, Examined) and each.experiment == "averages"]
    assert [each["kind"] for each in facts[-1]["copies"]] == ["dict"]
