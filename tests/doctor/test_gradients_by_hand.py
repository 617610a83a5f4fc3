"""Loops that write gradients by hand, from a copy in 16 bits or from a second loss, beside those that forget some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.runlog.records import Found

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

Give = Callable[[nn.Parameter, Tensor], None]
NAMES = {"opt.missing_zero_grad", "accum.grads_discarded", "law.gradient.adds_up"}


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    y = (x @ torch.randn(6, 3)).argmax(1)
    return [(x[rows], y[rows]) for rows in (torch.randperm(64)[:16] for _ in range(steps))]


def alarms(watch: Any) -> dict[str, Found]:
    assert watch.session.failures == []
    return {each.code: each for each in watch.findings() if each.severity != "info"}


def assign(master: nn.Parameter, gradient: Tensor) -> None:
    master.grad = gradient


def copy_into(master: nn.Parameter, gradient: Tensor) -> None:
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    master.grad.copy_(gradient)


@pytest.mark.parametrize("give", [assign, copy_into])
def test_masters_get_the_gradients_of_a_copy(give: Give) -> None:
    """Mixed precision by hand: with a loss scale that is too high at first, so that updates are left out."""
    every = batches(14)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    masters = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in model.parameters()])
    model.half()
    optimizer, scale = torch.optim.Adam(masters.parameters(), 1e-2), 2.0**20
    with tw.watch([model, masters], optimizer, out=None, quiet=True) as watch:
        for x, y in every:
            for p in model.parameters():
                p.grad = None
            (scale * F.cross_entropy(model(x.half()).float(), y)).backward()
            gradients = [p.grad.float() / scale for p in model.parameters() if p.grad is not None]
            if not all(bool(each.isfinite().all()) for each in gradients):
                scale /= 2
                continue
            for master, gradient in zip(masters, gradients):
                give(master, gradient)
            optimizer.step()
            with torch.no_grad():
                for p, master in zip(model.parameters(), masters):
                    p.copy_(master)
    assert alarms(watch).keys() & (NAMES | {"law.update.gradients_are_those_made"}) == set()


@pytest.mark.parametrize(("every", "by_hand"), [(1, True), (4, True), (1, False), (4, False)])
def test_a_second_optimizer_that_learns_from_another_loss(every: int, by_hand: bool) -> None:
    """Its gradients are written by hand before its step, or those of the first loss are never dropped."""
    model, log_decay = nn.Linear(6, 3), nn.Parameter(torch.full((3,), -5.0))
    extra = nn.ParameterList([log_decay])
    inner, outer = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD([log_decay], 0.01)
    with tw.watch([model, extra], [inner, outer], out=None, quiet=True) as watch:
        for number, (x, y) in enumerate(batches(24)):
            inner.zero_grad()
            penalty = (log_decay.exp().unsqueeze(1) * model.weight.square()).sum()
            (F.cross_entropy(model(x), y) + penalty).backward()
            inner.step()
            if number % every == every - 1:
                if by_hand:
                    log_decay.grad = 0.1 * torch.randn(3)
                outer.step()
    assert ("opt.missing_zero_grad" in alarms(watch)) != by_hand


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("by", ["data", "no_grad", "nothing"])
def test_gradients_that_a_step_by_hand_has_used_are_not_lost(by: str, optimizers: int) -> None:
    """An extragradient: a step by hand, the gradients there, and the update from where the step began."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    every = [torch.optim.SGD(m.parameters(), 0.1) for m in ([model] if optimizers == 1 else [model[0], model[2]])]
    with tw.watch(model, every, out=None, quiet=True) as watch:
        for x, y in batches(24):
            begin = [p.detach().clone() for p in model.parameters()]
            for is_last, rows in ((False, slice(8)), (True, slice(8, 16))):
                model.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                if is_last:
                    break
                for p in model.parameters():
                    if by == "data":
                        p.data.sub_(p.grad, alpha=0.1)
                    elif by == "no_grad":
                        with torch.no_grad():
                            p -= 0.1 * p.grad
            with torch.no_grad():
                for p, was in zip(model.parameters(), begin):
                    p.copy_(was)
            for optimizer in every:
                optimizer.step()
    told = {"accum.grads_discarded", "law.program.calls_come_in_order"} & alarms(watch).keys()
    assert bool(told) == (by == "nothing")


def test_gradients_that_others_are_projected_off_are_not_lost() -> None:
    """Averaged gradient episodic memory (Chaudhry et al., 2019)."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (old_x, old_y), *later = batches(24)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for x, y in later:
            optimizer.zero_grad()
            F.cross_entropy(model(old_x), old_y).backward()
            kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
            F.cross_entropy(model(x[:8]), y[:8]).backward()
            along = sum((one * p.grad).sum() for one, p in zip(kept, model.parameters()) if p.grad is not None)
            if along < 0:
                size = sum(one.square().sum() for one in kept)
                for one, p in zip(kept, model.parameters()):
                    p.grad -= along / size * one
            optimizer.step()
    assert not alarms(watch)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("dropped", ["outliers", "all but the last"])
def test_micro_batches_whose_gradients_are_dropped(dropped: str, clips: bool) -> None:
    """A clip reads gradients, too: that is no use of them."""
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for number, (x, y) in enumerate(batches(36)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            is_outlier = number % 5 == 3
            if (dropped == "outliers" and not is_outlier) or (number % 3 == 2 and dropped != "outliers"):
                optimizer.step()
    assert ("accum.grads_discarded" in alarms(watch)) == (dropped != "outliers")
