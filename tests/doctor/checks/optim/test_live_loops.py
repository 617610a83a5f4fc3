"""Instruments of calls, schedules, kept states, names, moments and gradients in loops that run."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.loops import BATCH, WIDTH, alarms, mlp, watched

pytestmark = pytest.mark.slow
Adam = torch.optim.Adam


def trained(
    step: Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], object],
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 12,
) -> list[str]:
    """The alarms of a loop whose step is replaced."""
    torch.manual_seed(0)
    model = model or mlp()
    optimizer = optimizer or Adam(model.parameters(), 1e-2)
    x = torch.randn(128, WIDTH)
    y = (x @ torch.randn(WIDTH, 4)).argmax(1)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for n in range(steps):
            rows = torch.arange(n * BATCH, (n + 1) * BATCH) % len(x)
            step(model, optimizer, x[rows], y[rows])
    assert watch.session.failures == []
    return alarms(watch)


def backward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    backward(model, x, y)
    optimizer.step()


def never_zeroed(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    backward(model, x, y)
    optimizer.step()


def zeroed_late(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    backward(model, x, y)
    optimizer.zero_grad()
    optimizer.step()


def never_stepped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    backward(model, x, y)


@pytest.mark.parametrize("cleared", [True, False], ids=["cleared", "left"])
def test_a_part_of_the_model_clears_the_gradients_of_its_optimizer(cleared: bool) -> None:
    """As in DCGAN: each network is zeroed by ``module.zero_grad()``, inside of the step."""
    torch.manual_seed(0)
    both = nn.ModuleDict({"first": mlp(), "second": mlp()})
    optimizers = [Adam(each.parameters(), 1e-2) for each in both.values()]
    x, y = torch.randn(128, WIDTH), torch.randint(4, (128,))
    with tw.watch(both, optimizers, out=None, quiet=True) as watch:
        for n in range(12):
            rows = torch.arange(n * BATCH, (n + 1) * BATCH) % len(x)
            for part, optimizer in zip(both.values(), optimizers, strict=True):
                if cleared or part is both["first"]:
                    part.zero_grad()
                backward(part, x[rows], y[rows])
                optimizer.step()
    assert ("optim.missing_zero_grad" in alarms(watch)) is not cleared


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (never_zeroed, "optim.missing_zero_grad"),
        (zeroed_late, "optim.zero_grad_before_step"),
        (never_stepped, "optim.step_never_called"),
    ],
)
def test_the_order_of_calls(step: Callable[..., object], expected: str) -> None:
    assert trained(step)[0] == expected


def test_a_healthy_loop_is_quiet() -> None:
    assert trained(usual) == []


def test_parameters_and_optimizers_that_do_not_belong_together() -> None:
    model = mlp()
    assert "optim.params_missing" in trained(usual, model=model, optimizer=Adam(model[:1].parameters(), 1e-2))
    other = copy.deepcopy(model)
    assert "optim.stale_params" in trained(usual, model=other, optimizer=Adam(model.parameters(), 1e-2))


@pytest.mark.parametrize("is_wrong", [True, False], ids=["generator", "discriminator"])
def test_the_optimizer_of_a_discriminator_that_is_frozen_in_turns(is_wrong: bool) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    of_critic = Adam((generator if is_wrong else critic).parameters(), 1e-3)
    of_generator = Adam(generator.parameters(), 1e-3)
    with tw.watch([generator, critic], [of_generator, of_critic], out=None, quiet=True) as watch:
        for _ in range(16):
            generator.requires_grad_(False), critic.requires_grad_(True)
            critic.zero_grad()
            loss = F.softplus(-critic(torch.randn(8, 4) + 1)) + F.softplus(critic(generator(torch.randn(8, 2))))
            loss.mean().backward()
            of_critic.step()
            generator.requires_grad_(True), critic.requires_grad_(False)
            generator.zero_grad()
            F.softplus(-critic(generator(torch.randn(8, 2)))).mean().backward()
            of_generator.step()
    assert ("optim.params_missing" in alarms(watch)) == is_wrong


def test_the_trial_trains_the_missing_parameters_and_restores_the_optimizer() -> None:
    model = mlp()
    optimizer = Adam(model[2:].parameters(), 1e-2)
    held = list(optimizer.param_groups[0]["params"])
    watch = watched(model, optimizer=optimizer, steps=40)
    tried = [each for found in watch.findings() if found.code == "optim.params_missing" for each in found.tried]
    (with_them, without) = re.findall(r"-> ([0-9.e-]+) in 8 steps", str(tried))
    assert float(with_them) < float(without)
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], held)) and len(held) == 2


@pytest.mark.parametrize(("unscales", "expected"), [(False, True), (True, False)])
def test_a_scaled_loss_is_unscaled(unscales: bool, expected: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if unscales:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    assert ("precision.gradients_not_unscaled" in trained(step)) == expected


@pytest.mark.parametrize(("factor", "expected"), [(2e-3, True), (1.0, False)], ids=["a rate", "a factor"])
def test_a_factor_that_is_a_rate(factor: float, expected: bool) -> None:
    model = mlp()
    optimizer = Adam(model.parameters(), 2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor * 0.99**step)

    def advance() -> None:
        scheduler.step()  # looked up while the watch is there

    watch = watched(model, optimizer=optimizer, after_update=advance)
    assert ("schedule.factor_is_rate" in alarms(watch)) == expected


@pytest.mark.parametrize(("turned", "expected"), [(True, True), (False, False)])
def test_moments_of_other_parameters(turned: bool, expected: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
    with torch.no_grad():
        for n, layer in enumerate(layers):
            layer.weight.mul_(6.0**n)
    optimizer = Adam(model.parameters(), 1e-4)
    trained(usual, model=model, optimizer=optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    order = [p for layer in (layers[::-1] if turned else layers) for p in layer.parameters()]
    again = Adam([*order, *model[-1].parameters()], 1e-4)
    again.load_state_dict(state)
    assert ("optim.moments_of_other_params" in trained(usual, model=model, optimizer=again)) == expected


class Centres(nn.Module):
    """A loss with a weight vector for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ self.weight.T, y)


@pytest.mark.parametrize("held", ["in no optimizer", "in its own", "frozen", "trained by hand"])
def test_the_weights_of_a_loss_are_in_an_optimizer(held: str) -> None:
    model, criterion = mlp(), Centres().requires_grad_(held != "frozen")
    optimizers = [Adam(each.parameters(), 1e-2) for each in ([model, criterion] if held == "in its own" else [model])]
    with tw.watch(model, optimizers[0], out=None, quiet=True, examine="listen") as watch:
        for _ in range(6):
            loss = criterion(model(torch.randn(16, WIDTH)), torch.randint(4, (16,)))
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            for each in optimizers:
                each.step()
            if held == "trained by hand" and criterion.weight.grad is not None:
                criterion.weight.data -= 0.01 * criterion.weight.grad
    found = [each.where.module for each in watch.findings() if each.code == "optim.params_missing"]
    assert found == (["Centres"] if held == "in no optimizer" else [])


@pytest.mark.parametrize(
    ("kept_as", "expected"),
    [
        (lambda state: state, True),
        (dict, True),
        (lambda state: {name: value.cpu() for name, value in state.items()}, True),
        (lambda state: {name: value.detach() for name, value in state.items()}, True),
        (lambda state: {name: value.clone() for name, value in state.items()}, False),
        (copy.deepcopy, False),
    ],
    ids=["the state", "dict", "cpu of cpu tensors", "detached", "clone", "deepcopy"],
)
def test_a_kept_state_is_a_copy(kept_as: Callable[[dict[str, Tensor]], object], expected: bool) -> None:
    model = mlp()
    kept: list[Any] = []

    def keep() -> None:
        if not kept:
            kept.append(kept_as(model.state_dict()))
        elif len(kept) < 12:
            kept.append(None)
        elif len(kept) == 12:
            model.load_state_dict(kept[0])
            kept.append(None)

    assert ("checkpoint.kept_state_changes" in alarms(watched(model, after_update=keep))) == expected


def test_modes_that_do_not_come_back() -> None:
    model = mlp(nn.Dropout(0.2))
    count = []

    def evaluate() -> None:
        count.append(0)
        if len(count) == 6:
            model.eval()

    assert "loop.trains_in_eval_mode" in alarms(watched(model, after_update=evaluate))
    assert alarms(watched(mlp(nn.Dropout(0.2)))) == []
