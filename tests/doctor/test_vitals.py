"""The laws of the vital signs: they hold on healthy loops, and are broken, at the right place, by every violation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.doctor.law_loops import BATCH, Change, Loop, broken, found, net, states, watched

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second


def cut(loop: Loop) -> None:
    """No gradient comes to the first layer."""
    model = loop.model
    assert isinstance(model, nn.Sequential)
    loop.forward = lambda x: model[3](model[:3](x).detach())


def dead(loop: Loop) -> None:
    """The units of the first layer are 0 for every sample, so its gradient is."""
    model = loop.model
    assert isinstance(model, nn.Sequential) and isinstance(model[0], nn.Linear)
    model[0].bias.data.fill_(-100.0)


class WithUnused(nn.Module):
    """Has a layer that is called, and what it gives is multiplied by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = net(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        used: Tensor = self.used(x) + 0.0 * self.unused(x)
        return used


def rounded(loop: Loop) -> None:
    """A layer behind a step function."""
    model = loop.model
    assert isinstance(model, nn.Sequential)
    loop.forward = lambda x: model[3](model[0](x).sign())


def seeded(loop: Loop) -> None:
    loop.begin = lambda step: torch.manual_seed(0)


def seeded_in_each_epoch(loop: Loop) -> None:
    loop.begin = lambda step: torch.manual_seed(0) if step % 5 == 0 else None


def state_set_back(loop: Loop) -> None:
    state = torch.get_rng_state()
    loop.end = lambda step: torch.set_rng_state(state)


def evaluated_for_good(loop: Loop) -> None:
    """From some step on nothing is drawn any more: the random state stands still."""
    loop.begin = lambda step: loop.model.eval() if step == 5 else None


def by_slices(loop: Loop) -> None:
    """The batches are views of the data. The third epoch begins in step 8."""
    rows = 32
    loop.batch = lambda step: slice(step * rows % 128, step * rows % 128 + rows)  # type: ignore[assignment, return-value]


def normalised_in_place(loop: Loop) -> None:
    by_slices(loop)
    loop.begin = lambda step: loop.x[loop.batch(step)].mul_(0.5)


def written_by_the_model(loop: Loop) -> None:
    by_slices(loop)
    model = loop.model
    loop.forward = lambda x: model(x)
    model.register_forward_pre_hook(lambda module, args: (args[0].add_(0.1),))


def masked_by_the_loop(loop: Loop) -> None:
    by_slices(loop)
    loop.end = lambda step: loop.x[loop.batch(step)].clamp_(-0.1 * step, 0.1 * step)


def frozen_with_its_gradient(loop: Loop) -> None:
    """The gradient that a frozen weight has left goes on moving it."""
    first = next(loop.model.parameters())

    def freeze(step: int) -> None:
        if step == 4:
            first.requires_grad_(False)
        if step >= 4:
            first.grad = torch.ones_like(first)

    loop.begin = lambda step: None
    loop.before_update = freeze


def frozen_with_decay(loop: Loop) -> None:
    """The optimizer decays a weight whose gradient is 0."""
    first = next(loop.model.parameters())
    loop.before_update = lambda step: setattr(first, "grad", torch.zeros_like(first))
    first.requires_grad_(False)


def frozen_and_held(loop: Loop) -> None:
    """As it should be."""
    first = next(loop.model.parameters())
    first.requires_grad_(False)
    first.grad = None


def uphill(loop: Loop) -> None:
    loop.before_update = lambda step: loop.optimizer.param_groups[0].update(lr=1e-2 * (5 - step))


def stopped(loop: Loop) -> None:
    loop.before_update = lambda step: loop.optimizer.param_groups[0].update(lr=1e-2 if step < 5 else 0.0)


def decayed(loop: Loop) -> None:
    loop.before_update = lambda step: loop.optimizer.param_groups[0].update(lr=1e-2 * 0.2 ** min(step, 4) * (step < 5))


def of_constants(loop: Loop) -> None:
    """The loss has a graph to the weights, and no value from them."""
    model = loop.model
    loop.forward = lambda x: model(x) * 1e-30


def clamped(loop: Loop) -> None:
    loop.loss = lambda out, y: out.square().mean().clamp(min=314.159)


def grows(loop: Loop) -> None:
    """A loss without a lower bound."""
    loop.loss = lambda out, y: -out.square().mean()


def shrinks(loop: Loop) -> None:
    def shrink(step: int) -> None:
        for p in loop.model.parameters():
            p.data.mul_(0.7)

    loop.end = shrink


HEALTHY: dict[str, Callable[[], set[str]]] = {
    "float32": lambda: broken(watched(), "vitals"),
    "bfloat16": lambda: broken(watched(dtype=torch.bfloat16), "vitals"),
    "momentum": lambda: broken(watched(optimizer=torch.optim.SGD, lr=0.1), "vitals"),
    "views": lambda: broken(watched(by_slices), "vitals"),
    "eval mode": lambda: broken(watched(evaluated_for_good), "vitals"),
    "decayed": lambda: broken(watched(decayed), "vitals"),
    "frozen": lambda: broken(watched(frozen_and_held), "vitals"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_the_laws_hold_on_a_healthy_loop(name: str) -> None:
    assert HEALTHY[name]() == set()


def test_what_was_looked_at_is_told() -> None:
    state = states(watched(by_slices), "vitals")
    assert (state["weights_move"].state, state["weights_move"].why) == ("held", "4 of 4 tensors over 14 updates")
    assert (state["frozen_stays"].state, state["noise_is_new"].state) == ("not applicable", "held")
    assert state["data_stay"].why == "14 steps, 10 parts came again"
    without = states(watched(model=lambda: net(0.0)), "vitals")["noise_is_new"]
    assert (without.state, without.why) == ("not applicable", "no random numbers are drawn while a step runs")


@pytest.mark.parametrize(
    ("change", "law", "module"),
    [
        (seeded, "noise_is_new", None),
        (seeded_in_each_epoch, "noise_is_new", None),
        (state_set_back, "noise_is_new", None),
        (normalised_in_place, "data_stay", None),
        (written_by_the_model, "data_stay", None),
        (masked_by_the_loop, "data_stay", None),
        (frozen_with_its_gradient, "frozen_stays", "0"),
        (frozen_with_decay, "frozen_stays", "0"),
        (uphill, "rates_are_positive", None),
        (stopped, "rates_are_positive", None),
        (of_constants, "loss_moves", None),
        (clamped, "loss_moves", None),
    ],
)
def test_a_violation_breaks_its_law(change: Change, law: str, module: str | None) -> None:
    watch = watched(change, laws="cheap")
    assert found(watch, f"law.vitals.{law}").where.module == module
    assert law in broken(watch, "vitals")


@pytest.mark.parametrize("change", [cut, rounded])
def test_weights_that_no_gradient_reaches_do_not_move(change: Change) -> None:
    """Whether what feeds the loss stands still is seen where steps are run again."""
    law, module, watch = "weights_move", "0", watched(change, steps=12)
    assert found(watch, f"law.vitals.{law}").where.module == module
    assert law in broken(watch, "vitals")


@pytest.mark.parametrize("onset", [100, 112])
def test_noise_that_comes_again_in_a_calm_loop_is_found_within_20_steps(onset: int) -> None:
    def change(loop: Loop) -> None:
        loop.end = lambda step: torch.manual_seed(0) if step >= onset else None

    again = found(watched(change, steps=onset + 20, laws="cheap"), "loop.random_state_repeats")
    assert again.severity == "warning"
    assert onset < again.step <= onset + 20


def test_steps_that_draw_nothing_between_those_that_do_begin_alike() -> None:
    def change(loop: Loop) -> None:
        loop.loss = lambda out, y: nn.functional.cross_entropy(out + 1e-3 * noise(), y)
        steps = count(1)

        def noise() -> Tensor:
            return torch.randn(()) if next(steps) % 16 == 0 else torch.zeros(())

    watch = watched(change, steps=132, model=lambda: net(0.0), laws="cheap")
    assert states(watch, "vitals")["noise_is_new"].state == "held"


def test_what_nothing_uses_is_an_info_at_first() -> None:
    unused = found(watched(model=WithUnused), "optim.weights_never_move")
    assert (unused.severity, unused.where.module) == ("info", "unused")


class Slopes(nn.Module):
    """What is trained is the slope of a scalar: its last bias cancels out."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return slope[:, :4]


def test_a_bias_that_slopes_do_not_depend_on_is_an_info() -> None:
    told = found(watched(model=Slopes, steps=12), "optim.weights_never_move")
    assert told.severity == "info" and "energy.2.bias" in told.symptom and "slopes" in told.cause


def test_a_name_takes_the_law_in() -> None:
    watch = watched(dead)
    [first] = [each for each in watch.findings() if each.severity != "info"]
    assert first.code == "model.dead_relu"
    assert "weights_move" in broken(watch, "vitals")


def test_a_rate_that_is_off_by_orders_of_magnitude() -> None:
    assert "rate_is_useful" in broken(watched(lr=1e-6, steps=24), "vitals")
    assert "rate_is_useful" not in broken(watched(lr=1e-3, steps=24), "vitals")
    assert "rate_is_useful" in broken(watched(scaled_down, lr=1e-2, steps=24, optimizer=torch.optim.SGD), "vitals")


def test_a_rate_of_0_from_the_first_step_on_is_no_warm_up() -> None:
    told = found(watched(lr=0.0, steps=20, laws="cheap"), "law.vitals.rates_are_positive")
    assert (told.severity, told.symptom) == ("warning", "the learning rate was 0 in all of 20 updates")


def scaled_down(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.register_hook(lambda grad: grad * 1e-3)


@pytest.mark.parametrize(
    ("change", "optimizer", "lr"), [(grows, torch.optim.SGD, 0.3), (shrinks, torch.optim.AdamW, 1e-3)]
)
def test_a_weight_that_runs_away(change: Change, optimizer: Callable[..., Optimizer], lr: float) -> None:
    watch = watched(change, optimizer=optimizer, lr=lr, steps=26, laws="cheap")
    assert "scales_hold" in broken(watch, "vitals")


def test_nothing_moves_where_updates_are_too_small() -> None:
    watch = watched(lr=1e-12)
    assert "weights_move" in broken(watch, "vitals")
    assert watch.findings()[0].severity == "critical"
    assert BATCH * watch.step == 224


def test_what_stood_is_told_of_when_the_rate_is_0() -> None:
    def at_0_in_the_end(loop: Loop) -> None:
        cut(loop)
        loop.end = lambda step: loop.optimizer.param_groups[0].update(lr=0.0) if step == 20 else None

    assert "weights_move" in broken(watched(at_0_in_the_end, steps=22), "vitals")
