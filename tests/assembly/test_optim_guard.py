"""Skipped steps, gradient scale, resuming, and what else every optimizer of ours must bear."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.assembly.optim_net import DECAY, LR, STEPS, assert_near, fill_grads, net, train
from trainwright.errors import UsageError
from trainwright.optim.choose import make_optimizer
from trainwright.optim.lamb import Lamb, Lars

OURS = ["muon", "lamb", "lars"]
GUARDED = [*OURS, "sgd", "adam", "adamw"]


def snapshot(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    states = [optimizer.state.get(parameter, {}) for parameter in model.parameters()]
    return [
        *(parameter.detach().clone() for parameter in model.parameters()),
        *(tensor.clone() for state in states for tensor in state.values()),
    ]


def step_with(optimizer: Any, found_inf: float | None, grad_scale: float | None = None) -> None:
    """As the engine and GradScaler do it."""
    optimizer.found_inf = None if found_inf is None else torch.tensor(found_inf)
    optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale)
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(left, right, strict=True)
        if a.ndim
    ) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("name", GUARDED)
def test_a_skipped_step_leaves_the_same_bits(name: str, poison: float) -> None:
    model = net(torch.float32)
    optimizer = make_optimizer(name, model, lr=LR, weight_decay=DECAY)
    train(model, optimizer, range(3))
    before = snapshot(model, optimizer)
    fill_grads(model, 3, poison)
    step_with(optimizer, 1.0)
    assert same_bits(before, snapshot(model, optimizer))
    fill_grads(model, 3)
    optimizer.step()
    assert not same_bits(before, snapshot(model, optimizer))


@pytest.mark.parametrize("name", GUARDED)
def test_a_run_whose_first_step_is_skipped_is_as_if_it_began_later(name: str) -> None:
    model, reference = net(torch.float32), net(torch.float32)
    optimizer = make_optimizer(name, model, lr=LR, weight_decay=DECAY)
    fill_grads(model, 99, math.nan)
    step_with(optimizer, 1.0)
    theirs = make_optimizer(name, reference, lr=LR, weight_decay=DECAY)
    assert same_bits(train(model, optimizer), train(reference, theirs))


@pytest.mark.parametrize("name", OURS)
def test_grad_scale_divides_and_leaves_the_gradients_alone(name: str) -> None:
    model, reference = net(torch.float32), net(torch.float32)
    optimizer = make_optimizer(name, model, lr=LR)
    theirs = make_optimizer(name, reference, lr=LR)
    for step in range(3):
        fill_grads(model, step)
        fill_grads(reference, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1024.0)  # a power of two: exact
        scaled = [copy.deepcopy(parameter.grad) for parameter in model.parameters()]
        step_with(optimizer, 0.0, 1024.0)
        theirs.step()
        assert all(
            torch.equal(p.grad, g) for p, g in zip(model.parameters(), scaled) if p.grad is not None and g is not None
        )
    assert same_bits(snapshot(model, optimizer), snapshot(reference, theirs))


@pytest.mark.parametrize("name", [*GUARDED, "adafactor"])
def test_state_dict_continues_with_the_same_bits(name: str, tmp_path: Any) -> None:
    whole = net(torch.float32)
    expected = train(whole, make_optimizer(name, whole, lr=LR, weight_decay=DECAY))

    first = net(torch.float32)
    optimizer = make_optimizer(name, first, lr=LR, weight_decay=DECAY)
    train(first, optimizer, range(9))
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")

    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    second = net(torch.float32, seed=1)
    second.load_state_dict(saved["model"])
    resumed = make_optimizer(name, second, lr=LR, weight_decay=DECAY)
    resumed.load_state_dict(saved["optimizer"])
    assert same_bits(train(second, resumed, range(9, STEPS)), expected)


@pytest.mark.parametrize("name", OURS)
def test_a_closure_is_run_with_gradients_and_its_loss_comes_back(name: str) -> None:
    model = net(torch.float32)
    optimizer = make_optimizer(name, model, lr=LR)
    before = snapshot(model, optimizer)

    def closure() -> float:
        fill_grads(model, 0)
        return 1.25

    assert optimizer.step(closure) == 1.25
    assert not same_bits(before, snapshot(model, optimizer)[: len(before)])


@pytest.mark.parametrize("name", OURS)
def test_a_parameter_without_gradient_stays(name: str) -> None:
    model = net(torch.float32)
    optimizer = make_optimizer(name, model, lr=LR, weight_decay=DECAY)
    fill_grads(model, 0)
    model.mix.weight.grad = None
    before = model.mix.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.mix.weight.detach(), before)
    assert model.mix.weight not in optimizer.state


@pytest.mark.slow
def test_a_large_parameter_list_is_updated_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        whole, cut = net(), net()
        expected = train(whole, make_optimizer(name, whole, lr=LR))
        monkeypatch.setattr("trainwright.optim.guarded.BUCKET_BYTES", 100)
        assert_near(train(cut, make_optimizer(name, cut, lr=LR)), expected, 1e-2 if name == "muon" else 1e-12)
        monkeypatch.undo()


def test_sparse_and_complex_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = Lamb(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()
    with pytest.raises(UsageError, match="complex"):
        Lars([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
