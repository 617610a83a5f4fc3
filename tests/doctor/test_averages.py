"""The laws of averages hold for moving averages as people write them, and break where one is none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.doctor.averages.measure import _Pair
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

Average = Callable[[nn.Module], Callable[[int], Any]]
"""Makes an average of a model; what it returns is called after every step, and holds it."""


def watched(make: Average) -> Any:
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    follow = make(model)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(42):
            rows = torch.randperm(64)[:16]
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]), x[rows, :3]).backward()
            optimizer.step()
            follow(step)
    assert watch.session.failures == []
    return watch


def states(watch: Any) -> dict[str, str]:
    laws = diagnose(Case(watch.records, finished=True)).laws
    return {each.name.removeprefix("averages."): each.state for each in laws if each.name.startswith("averages.")}


def of_module(
    share: Callable[[int], float],
    *,
    growth: float = 1.0,
    skip: int = 99,
    buffers: bool = True,
    every: int = 1,
    listed: bool = False,
) -> Average:
    """A copied module, or a list, whose tensors go a share of the way at each step."""

    def make(model: nn.Module) -> Callable[[int], Any]:
        average = copy.deepcopy(model)
        means = [p.detach().clone() for p in model.parameters()] if listed else list(average.parameters())

        @torch.no_grad()
        def follow(step: int) -> None:
            pairs = list(zip(means, model.parameters()))
            for mean, new in pairs[:skip] if step % every == 0 else ():
                mean.mul_(growth).lerp_(new, share(step))
            for mean, new in zip(average.buffers(), model.buffers()) if buffers and not listed else ():
                mean.copy_(new)

        return follow

    return make


def in_a_dict(model: nn.Module) -> Callable[[int], Any]:
    """Replaces its tensors at each step."""
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def follow(step: int) -> None:
        for name, p in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.detach()

    return follow


def averaged(model: nn.Module) -> Callable[[int], Any]:
    """That of torch, which takes the mean of all steps."""
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    return lambda step: average.update_parameters(model)


def kept(model: nn.Module) -> Callable[[int], Any]:
    """The best state so far."""
    best: dict[str, Tensor] = {}

    def follow(step: int) -> None:
        if step in (10, 30):
            best.update({name: value.clone() for name, value in model.state_dict().items()})

    return follow


HEALTHY: dict[str, Average] = {
    "warming up": of_module(lambda step: 1 - min(0.98, (1 + step) / (10 + step))),
    "now and then": of_module(lambda step: 0.1, every=4, listed=True),
    "in a dict": in_a_dict,
    "of torch": averaged,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_the_laws_hold_for_averages_as_people_write_them(name: str) -> None:
    watch = watched(HEALTHY[name])
    assert states(watch) == {
        "evaluated_copies_move": "not applicable",
        "weights_follow": "held",
        "parts_go_along": "held",
        "begin_is_forgotten": "not applicable",
        "used_statistics_are_measured": "not applicable",
    }
    assert [each.code for each in watch.findings() if each.code.startswith("law.averages.")] == []


@pytest.mark.parametrize("make", [kept, of_module(lambda step: 1.0, every=5)], ids=["kept", "target"])
def test_a_copy_is_no_average(make: Average) -> None:
    assert set(states(watched(make)).values()) == {"not applicable"}


def test_slow_weights_that_move_at_intervals_are_no_average_of_every_step() -> None:
    watch = watched(of_module(lambda step: 0.8, every=5))
    assert states(watch)["weights_follow"] == "not applicable"
    assert [each.code for each in watch.findings() if each.code.startswith("law.averages.")] == []


BROKEN: dict[str, tuple[Average, str]] = {
    "swapped factors": (of_module(lambda step: 0.98), "weights_follow"),
    "beyond the weights": (of_module(lambda step: -0.05), "weights_follow"),
    "shrinking": (of_module(lambda step: 0.02, growth=0.9), "weights_follow"),
    "all but the first left out": (of_module(lambda step: 0.05, skip=3), "parts_go_along"),
    "without buffers": (of_module(lambda step: 0.05, buffers=False), "parts_go_along"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_average_that_is_none(name: str) -> None:
    make, law = BROKEN[name]
    watch = watched(make)
    assert states(watch)[law] == "broken"
    broken = [(each.code, each.severity) for each in watch.findings() if each.code.startswith("law.averages.")]
    assert broken == [(f"law.averages.{law}", "warning")]


def evaluated(copied: bool, moves: bool, every: int, share: float = 0.1) -> Average:
    """A copy, or the model, is evaluated now and then."""

    rows, aim = torch.zeros(4, 6), torch.zeros(4, 3)

    def make(model: nn.Module) -> Callable[[int], Any]:
        other = copy.deepcopy(model)

        @torch.no_grad()
        def follow(step: int) -> None:
            for mean, new in zip(other.parameters(), model.parameters()) if moves else ():
                mean.lerp_(new, share)
            if step % every == 0:
                F.mse_loss((other if copied else model)(rows), aim)

        return follow

    return make


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (evaluated(copied=True, moves=False, every=6), "broken"),
        (evaluated(copied=True, moves=True, every=6), "held"),
        (evaluated(copied=True, moves=False, every=1), "held"),
        (evaluated(copied=False, moves=False, every=6), "not applicable"),
    ],
    ids=["stale", "average", "teacher", "model"],
)
def test_a_copy_that_is_evaluated_moves(make: Average, state: str) -> None:
    assert states(watched(make))["evaluated_copies_move"] == state


@pytest.mark.parametrize(
    ("share", "every", "state"),
    [(0.1, 6, "held"), (0.01, 6, "broken"), (0.001, 6, "broken"), (0.001, 1, "not applicable")],
)
def test_an_average_forgets_the_first_weights(share: float, every: int, state: str) -> None:
    make = evaluated(copied=True, moves=True, every=every, share=share)
    assert states(watched(make))["begin_is_forgotten"] == state


@pytest.mark.parametrize(
    ("prepare", "state"),
    [
        (lambda model: model.train(), "not applicable"),
        (lambda model: model.eval(), "broken"),
        (lambda model: model[1].eval(), "broken"),
        (lambda model: (model(torch.randn(64, 6)), model.eval()), "held"),
        (lambda model: model[1].eval().requires_grad_(False), "held"),
    ],
)
def test_statistics_that_are_used_were_measured(prepare: Callable[[Any], Any], state: str) -> None:
    def make(model: nn.Module) -> Callable[[int], Any]:
        prepare(model)
        return lambda step: None

    assert states(watched(make))["used_statistics_are_measured"] == state


def test_a_copy_on_the_meta_device_has_no_values() -> None:
    """As the skeleton of ``torch.func.functional_call`` is."""
    shell, weight = torch.empty(3, device="meta"), torch.ones(3)
    assert _Pair("weight", lambda: shell, lambda: weight).sample() is None
    assert _Pair("weight", lambda: weight, lambda: weight).sample() is not None
