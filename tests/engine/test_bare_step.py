"""The bare step: the bits of ``optimizer.step()``, which is still called wherever somebody would notice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainwright.engine.bare_step import _is_bare, take_step


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad()
    model(torch.randn(4, 5, generator=generator)).square().mean().backward()


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.8, 0.9), "eps": 1e-3}]
)
def test_bits_are_those_of_the_step_of_torch(kind: type[Adam], options: dict[str, Any]) -> None:
    ours, theirs = make_model(), make_model()
    one, other = (kind(model.parameters(), lr=0.01, fused=True, **options) for model in (ours, theirs))
    for seed in range(4):
        backward(ours, seed)
        backward(theirs, seed)
        if seed == 2:  # one of the weights has no gradient
            ours[0].weight.grad = theirs[0].weight.grad = None
        assert _is_bare(one)
        take_step(one)
        other.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
        assert p._version == q._version
        for name, value in one.state[p].items():
            assert torch.equal(value, other.state[q][name])


def test_each_group_has_its_own_settings() -> None:
    ours, theirs = make_model(), make_model()
    one, other = (
        AdamW(
            [{"params": m[0].parameters(), "lr": 0.1}, {"params": m[2].parameters(), "weight_decay": 0.5}], fused=True
        )
        for m in (ours, theirs)
    )
    for seed in range(3):
        backward(ours, seed)
        backward(theirs, seed)
        take_step(one)
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


class Own(AdamW):
    """Another class may do anything in its step."""


def hooked(optimizer: Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)


def scheduled(optimizer: Optimizer) -> None:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # it replaces step of the object


def scaled(optimizer: Optimizer) -> None:
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]


def with_rate_in_a_tensor(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)


@pytest.mark.parametrize("change", [hooked, scheduled, scaled, with_rate_in_a_tensor])
def test_whoever_listens_is_heard(change: Any) -> None:
    optimizer = AdamW(make_model().parameters(), fused=True)
    assert _is_bare(optimizer)
    change(optimizer)
    assert not _is_bare(optimizer)


def test_a_profiler_sees_the_step() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), fused=True)
    backward(model, 0)
    with torch.profiler.profile(acc_events=True) as profile:
        take_step(optimizer)
    assert any(event.key == "Optimizer.step#AdamW.step" for event in profile.key_averages())


def test_a_replaced_method_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters(), fused=True)
    backward(model, 0)
    called = []
    monkeypatch.setattr(AdamW, "step", lambda self: called.append(self))
    take_step(optimizer)
    assert called == [optimizer]


@pytest.mark.parametrize(
    "make", [lambda p: SGD(p, fused=True), lambda p: AdamW(p), lambda p: AdamW(p, foreach=True), lambda p: Own(p)]
)
def test_other_optimizers_take_their_own_step(make: Any) -> None:
    ours, theirs = make_model(), make_model()
    one = make(ours.parameters())
    other = make(theirs.parameters())
    for seed in range(2):
        backward(ours, seed)
        backward(theirs, seed)
        take_step(one)
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_weights_of_several_dtypes_are_left_to_torch() -> None:
    model = make_model()
    model[2].to(torch.float64)
    assert not _is_bare(AdamW(model.parameters(), fused=True))
    assert _is_bare(AdamW(copy.deepcopy(model).double().parameters(), fused=True))
