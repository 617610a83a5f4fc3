"""The laws of going on: they hold where all of a state was loaded, and break where a part was not."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import trainwright as tw
from tests.rows import each_row

X, Y = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3
Loop = tuple[nn.Module, Optimizer, LRScheduler]


def fresh(kind: type[Optimizer] = AdamW, seed: int = 0, width: int = 12) -> Loop:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
    optimizer = kind(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    return model, optimizer, CosineAnnealingLR(optimizer, 400)


def go_on(loop: Loop, steps: int, scale: float = 1.0, every: int = 1) -> None:
    model, optimizer, scheduler = loop
    for step in range(steps):
        rows = torch.randperm(64)[:32]
        optimizer.zero_grad()
        (scale * F.cross_entropy(model(X[rows]), Y[rows])).backward()
        optimizer.step()
        if step % every == every - 1:
            scheduler.step()


def saved(loop: Loop) -> list[dict[str, Any]]:
    return [deepcopy(each.state_dict()) for each in loop]


def broken(
    loop: Loop, load: Callable[[], object] = lambda: None, steps: int = 17, laws: str = "cheap", **how: Any
) -> dict[str, str]:
    """The laws of the family that break while ``loop`` is watched, with their severity."""
    with tw.watch(*loop[:2], scheduler=loop[2], laws=laws, out=None, quiet=True) as watch:
        load()
        go_on(loop, steps, **how)
    assert watch.session.failures == []
    return {
        f.code.removeprefix("law.resume."): f.severity for f in watch.findings() if f.code.startswith("law.resume.")
    }


@pytest.fixture(scope="module", params=[AdamW, Adam, SGD], ids=lambda kind: kind.__name__)
def run(request: pytest.FixtureRequest) -> tuple[type[Optimizer], list[dict[str, Any]]]:
    loop = fresh(request.param)
    go_on(loop, 60)
    return request.param, saved(loop)


@each_row("before", [True, False])
def test_they_hold_where_all_was_loaded(before: bool, run: tuple[type[Optimizer], list[dict[str, Any]]]) -> None:
    kind, states = run
    loop = fresh(kind, seed=1)

    def load() -> None:
        for each, state in zip(loop, states):
            each.load_state_dict(state)

    if before:
        load()
    assert broken(loop, (lambda: None) if before else load) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_hold_in_a_run_that_begins(dtype: torch.dtype) -> None:
    model, optimizer, scheduler = fresh()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is torch.bfloat16):
        assert broken((model, optimizer, scheduler)) == {}


def test_a_watch_that_begins_in_the_middle_is_no_resume() -> None:
    loop = fresh()
    go_on(loop, 30)
    assert broken(loop) == {}


def test_a_schedule_by_epochs_counts_otherwise() -> None:
    loop = fresh()
    go_on(loop, 9, every=10)
    assert broken(loop, every=10) == {}


def test_a_schedule_that_begins_anew_is_told(run: tuple[type[Optimizer], list[dict[str, Any]]]) -> None:
    kind, (weights, moments, _) = run
    loop = fresh(kind, seed=1)
    loop[0].load_state_dict(weights)
    loop[1].load_state_dict({**moments, "param_groups": loop[1].state_dict()["param_groups"]})
    assert broken(loop) == ({} if kind is SGD else {"counts_agree": "warning"}), "SGD without momentum counts nothing"


def test_moments_that_were_not_loaded_are_told() -> None:
    loop, earlier = fresh(seed=1), fresh()
    go_on(earlier, 60)
    weights, _, schedule = saved(earlier)
    loop[0].load_state_dict(weights)
    loop[2].load_state_dict(schedule)
    assert broken(loop) == {"counts_agree": "warning"}


def test_moments_of_another_shape_are_told_beside_the_error_of_torch() -> None:
    loop, other = fresh(), fresh()
    go_on(loop, 60)
    state = saved(loop)[1]["state"]
    state[1], state[3] = state[3], state[1]  # the biases, which are of two sizes
    other[1].load_state_dict({**other[1].state_dict(), "state": state})
    with pytest.raises(RuntimeError, match="must match the size"), tw.watch(*other[:2], out=None, quiet=True) as watch:
        go_on(other, 1)
    [found] = [each for each in watch.findings() if each.code == "law.resume.moments_belong_to_weights"]
    assert (found.severity, found.symptom) == (
        "critical",
        "moments of 0.bias, 2.bias have another shape than the weight",
    )


@each_row(("scale", "told"), [(1.0, False), (4.0, False), (1000.0, True), (1e-4, True)])
def test_a_loss_of_another_scale_is_told(scale: float, told: bool) -> None:
    loop = fresh()
    go_on(loop, 60)
    found = broken(loop, scale=scale, steps=2)
    assert found == ({"moments_belong_to_weights": "warning"} if told else {})


def prefixed(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


@each_row(
    ("change", "severity"),
    [
        (prefixed("module."), "critical"),
        (prefixed("_orig_mod."), "critical"),
        (lambda state: {name.replace("0.", "first."): t for name, t in state.items()}, "warning"),
        (lambda state: {}, "critical"),
        (lambda state: {name: t for name, t in state.items() if name != "2.bias"}, None),
        (lambda state: {**state, "old_head.weight": torch.zeros(3)}, None),
    ],
)
def test_weights_without_a_place_are_told(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], severity: str | None
) -> None:
    loop = fresh()
    state = change(dict(fresh(seed=2)[0].state_dict()))
    found = broken(loop, lambda: loop[0].load_state_dict(state, strict=False), steps=2)
    assert found.get("what_is_loaded_has_a_place") == severity


def test_the_state_of_an_adapter_has_no_frozen_weights() -> None:
    """All that is in the state has a place, and what is not there is not trained."""
    loop = fresh()
    model = loop[0]
    for p in list(model.parameters())[:-1]:
        p.requires_grad_(False)
    state = dict([*model.state_dict().items()][-1:])
    assert "what_is_loaded_has_a_place" not in broken(loop, lambda: model.load_state_dict(state, strict=False), steps=2)


def test_nothing_of_the_listener_is_left() -> None:
    loop = fresh()
    broken(loop)
    assert not loop[0]._load_state_dict_post_hooks
    assert not loop[1]._optimizer_load_state_dict_post_hooks  # type: ignore[attr-defined]
