"""Optimizers and schedulers inside of objects that wrap them are known by the parameter groups that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import trainwright as tw
from trainwright.errors import UsageError

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

STEPS = 24
"""More than the steps for which the optimizer of a scheduler may be one that steps seldom."""


class Noam:
    """Sets the learning rate and steps, as in many implementations of transformers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * min(self.steps**-0.5, self.steps / 8)
        self.optimizer.step()


class Forwarding(Optimizer):
    """Is an Optimizer by its class alone, as that of Accelerate."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


class _Mixin:
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.of.step(closure)  # type: ignore[attr-defined]


def of_a_class_that_is_made(optimizer: Optimizer) -> Optimizer:
    """As those of Lightning and Fabric: a subclass of the optimizer's class, with its attributes."""
    wrapper = object.__new__(type("Made", (_Mixin, type(optimizer)), {}))  # type: ignore[var-annotated]
    wrapper.__dict__ = {**vars(optimizer), "of": optimizer}
    return wrapper  # type: ignore[no-any-return]


class Sharpness(Optimizer):
    """Two passes and an optimizer of its own for the update, as SAM."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {"rho": 0.02})
        self.base_optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()


def loop(wrap: Callable[[Optimizer], Any], watched: str, *, keeps_gradients: bool = False) -> tw.Watch:
    """Trains with the wrapper. The watch gets the wrapper, the optimizer inside, or both are known by the schedule."""
    torch.manual_seed(0)
    x, model = torch.randn(64, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    y = (x @ torch.randn(8, 4)).argmax(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapper = wrap(optimizer)
    schedule = lr_scheduler.StepLR(wrapper if isinstance(wrapper, Optimizer) else optimizer, 100)
    with tw.watch(model, wrapper if watched == "wrapper" else optimizer, out=None, quiet=True) as watch:
        for step in range(STEPS):
            rows = torch.arange(step * 16, step * 16 + 16) % 64
            if keeps_gradients:
                wrapper.zero_grad(set_to_none=False)
            else:
                wrapper.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            wrapper.step()
            if not isinstance(wrapper, Noam):
                schedule.step()
    assert watch.session.failures == []
    return watch


WRAPPERS = [Noam, Forwarding, of_a_class_that_is_made, Sharpness]


@pytest.mark.parametrize("watched", ["wrapper", "optimizer"])
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_a_wrapped_optimizer_is_the_optimizer_inside(wrap: Callable[[Optimizer], Any], watched: str) -> None:
    watch = loop(wrap, watched)
    assert watch.step == STEPS
    assert [each.code for each in watch.findings() if each.severity != "info"] == []


def test_gradients_that_a_wrapper_empties_are_empty() -> None:
    watch = loop(of_a_class_that_is_made, "optimizer", keeps_gradients=True)
    assert [each.code for each in watch.findings() if each.severity != "info"] == []


class Both:
    """Two optimizers in one object."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = list(optimizers)

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()


def test_two_optimizers_in_one_object_are_both_watched() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    both = Both(torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[2].parameters(), 0.01))
    with tw.watch(model, both, out=None, quiet=True, examine="listen") as watch:  # type: ignore[arg-type]
        for _ in range(4):
            both.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            both.step()
    assert watch.step == 4
    assert [each.code for each in watch.findings()] == []


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_of_an_optimizer_that_never_steps_is_found() -> None:
    """Its groups are others, though the parameters are the same."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer, earlier = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
    schedule = lr_scheduler.StepLR(earlier, 10)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            schedule.step()
    assert "schedule.of_other_optimizer" in {each.code for each in watch.findings()}


def test_what_holds_no_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="the optimizer is a Linear"):
        tw.watch(nn.Linear(2, 2), nn.Linear(2, 2), out=None)  # type: ignore[arg-type]
