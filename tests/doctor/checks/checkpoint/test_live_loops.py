"""Checks of loading: they are silent if all of a state was loaded, and fire if a part was not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import trainwright as tw

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3
Loop = tuple[nn.Module, Optimizer, LRScheduler]


def fresh(kind: type[Optimizer] = AdamW, seed: int = 0) -> Loop:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = kind(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    return model, optimizer, CosineAnnealingLR(optimizer, 400)


def go_on(loop: Loop, steps: int, every: int = 1, after: Callable[[], object] = lambda: None) -> None:
    model, optimizer, scheduler = loop
    for step in range(steps):
        rows = torch.randperm(64)[:32]
        optimizer.zero_grad()
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
        after()
        if step % every == every - 1:
            scheduler.step()


def saved(loop: Loop) -> list[dict[str, Any]]:
    return [deepcopy(each.state_dict()) for each in loop]


def codes(loop: Loop, load: Callable[[], object] = lambda: None, steps: int = 17, **how: Any) -> dict[str, str]:
    """The alarms of this topic, with their severity."""
    with tw.watch(*loop[:2], scheduler=loop[2], out=None, quiet=True) as watch:
        load()
        go_on(loop, steps, **how)
    assert watch.session.failures == []
    assert not loop[0]._load_state_dict_post_hooks
    found = [each for each in watch.findings() if each.code.startswith("checkpoint.") and each.severity != "info"]
    return {each.code.removeprefix("checkpoint."): each.severity for each in found}


@pytest.fixture(scope="module", params=[AdamW, SGD], ids=lambda kind: kind.__name__)
def run(request: pytest.FixtureRequest) -> tuple[type[Optimizer], list[dict[str, Any]]]:
    loop = fresh(request.param)
    go_on(loop, 60)
    return request.param, saved(loop)


@pytest.mark.parametrize("before", [True, False])
def test_all_is_loaded(before: bool, run: tuple[type[Optimizer], list[dict[str, Any]]]) -> None:
    kind, states = run
    loop = fresh(kind, seed=1)

    def load() -> None:
        for each, state in zip(loop, states):
            each.load_state_dict(state)  # type: ignore[attr-defined]

    if before:
        load()
    assert codes(loop, (lambda: None) if before else load) == {}


def test_a_watch_that_begins_in_the_middle_is_no_resume() -> None:
    loop = fresh()
    go_on(loop, 30)
    assert codes(loop) == {}
    assert codes(fresh(), every=10) == {}, "a schedule by epochs"


def prefixed(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        (prefixed("module."), "critical"),
        (lambda state: {name.replace("0.", "first."): t for name, t in state.items()}, "warning"),
        (lambda state: {}, "critical"),
        (lambda state: {name: t for name, t in state.items() if name != "2.bias"}, None),
        (lambda state: {**state, "old_head.weight": torch.zeros(3)}, None),
    ],
)
def test_weights_without_a_place(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], severity: str | None
) -> None:
    loop = fresh()
    state = change(dict(fresh(seed=2)[0].state_dict()))
    found = codes(loop, lambda: loop[0].load_state_dict(state, strict=False), steps=2)
    assert found.get("weights_not_loaded") == severity


@pytest.mark.parametrize("into", ["nothing", "the model", "a teacher"])
def test_weights_without_a_place_before_the_watch(into: str) -> None:
    loop, teacher = fresh(), fresh(seed=1)[0]
    state = prefixed("backbone.")(fresh(seed=2)[0].state_dict())
    loop[0].load_state_dict(state, strict=False)
    if into != "nothing":
        (loop[0] if into == "the model" else teacher).load_state_dict({k[9:]: v for k, v in state.items()})
    with tw.watch(*loop[:2], out=None, quiet=True, examine="listen") as watch:
        go_on(loop, 3)
    found = [each.code for each in watch.findings() if each.code == "checkpoint.weights_not_loaded"]
    assert found == (["checkpoint.weights_not_loaded"] if into == "nothing" else [])


def test_the_state_of_an_adapter_has_no_frozen_weights() -> None:
    loop = fresh()
    model = loop[0]
    for p in list(model.parameters())[:-1]:
        p.requires_grad_(False)
    state = dict([*model.state_dict().items()][-1:])
    assert codes(loop, lambda: model.load_state_dict(state, strict=False), steps=2) == {}


@pytest.mark.parametrize("again", [True, False])
def test_loaded_weights_that_are_initialised_again(again: bool) -> None:
    loop, state = fresh(), fresh(seed=2)[0].state_dict()

    def load() -> None:
        loop[0].load_state_dict(state)
        for layer in loop[0].children():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight) if again else layer.weight.data.mul_(0.5)

    assert codes(loop, load, steps=4) == ({"loaded_weights_overwritten": "critical"} if again else {})


@pytest.mark.parametrize("initialised", [True, False])
def test_an_optimizer_that_continues_with_untrained_weights(initialised: bool) -> None:
    """The weights are lost before the second watch begins, so no load is seen."""
    loop = fresh()
    go_on(loop, 80)
    if initialised:
        torch.manual_seed(7)
        for layer in loop[0].children():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight)
    found = codes(loop, lambda: None, steps=8)
    assert ("loaded_weights_overwritten" in found) == initialised


@pytest.mark.parametrize("restored", [True, False])
def test_an_average_after_a_resume(restored: bool) -> None:
    loop = fresh()
    go_on(loop, 60)
    torch.manual_seed(3)
    average = copy.deepcopy(loop[0]) if restored else fresh(seed=5)[0]

    def follow() -> None:
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), loop[0].parameters()):
                mine.lerp_(theirs, 0.01)

    assert codes(loop, steps=40, after=follow) == ({} if restored else {"average_not_restored": "warning"})


@pytest.mark.parametrize("own", [True, False])
def test_a_target_network_that_is_loaded(own: bool) -> None:
    loop = fresh()
    target = copy.deepcopy(loop[0])
    assert codes(loop, steps=6, after=lambda: target.load_state_dict((target if own else loop[0]).state_dict())) == (
        {"loaded_from_itself": "warning"} if own else {}
    )


@pytest.mark.parametrize("buffers", ["left out", "copied", "computed again"])
def test_the_statistics_of_an_average(buffers: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 3))
    average = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = SGD(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for step in range(40):
            optimizer.zero_grad()
            F.cross_entropy(model(X + 3), Y).backward()
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters()):
                    mine.lerp_(theirs, 0.1)
                if buffers == "copied":
                    for mine, theirs in zip(average.buffers(), model.buffers()):  # type: ignore[assignment]
                        mine.copy_(theirs)
                if step == 35:
                    if buffers == "computed again":
                        average.train()(X + 3)
                    average.eval()(X)
    assert watch.session.failures == []
    found = [each.where.module for each in watch.findings() if each.code == "optim.average_without_buffers"]
    assert found == (["1"] if buffers == "left out" else [])
