"""Gradients that the loss of one part leaves in another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.doctor.measure.calls import Leftovers

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Parts = tuple[nn.Module, nn.Module]


def adversarial(parts: Parts) -> tuple[Tensor, Callable[[], Tensor]]:
    """The generator's loss runs through the judge, the judge's loss does not reach the generator."""
    made = parts[0](X)
    return F.softplus(-parts[1](made)).mean(), lambda: F.softplus(parts[1](made.detach())).mean()


def encoder_first(parts: Parts) -> tuple[Tensor, Callable[[], Tensor]]:
    """The second part encodes for the first: it is meant to collect the gradients of both losses."""
    return parts[0](parts[1](X)).square().mean(), lambda: parts[1](X).mean()


def with_weights_penalized(parts: Parts) -> tuple[Tensor, Callable[[], Tensor]]:
    """The first loss takes the weights of both parts, and no value of the first goes through the second."""
    return parts[0](X).square().mean() + parts[1](X).mean(), lambda: parts[1](X).square().mean()


@pytest.mark.parametrize(
    ("losses", "clears", "expected"),
    [
        (adversarial, "after", 2),
        (adversarial, "never", 3),
        (adversarial, "before", 0),
        (encoder_first, "after", 0),
        (with_weights_penalized, "after", 0),
    ],
)
def test_updates_with_leftovers(losses: Callable[[Parts], object], clears: str, expected: int) -> None:
    torch.manual_seed(0)
    bias = False
    parts = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), nn.Linear(6, 6, bias=bias)
    optimizers = [torch.optim.SGD(each.parameters(), 1e-2) for each in parts]
    leftovers = Leftovers(optimizers)

    def clear(n: int) -> None:
        optimizers[n].zero_grad()
        leftovers.on_zero_grad(optimizers[n])

    def update(n: int, loss: Tensor) -> None:
        leftovers.on_backward([loss])
        loss.backward()  # type: ignore[no-untyped-call]
        leftovers.on_step(optimizers[n])
        optimizers[n].step()

    for _ in range(3 if clears == "never" else 2):
        clear(0)
        first, second = losses(parts)  # type: ignore[misc]
        update(0, first)  # type: ignore[has-type]
        if clears == "before":
            clear(1)
        update(1, second())  # type: ignore[has-type]
        if clears == "after":
            clear(1)
    assert leftovers.found.get(1, 0) == expected
    assert 0 not in leftovers.found


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["before its backward", "after its step"])
def test_a_discriminator(late: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"coder": nn.Linear(6, 6), "judge": nn.Linear(6, 1)})
    coder, judge = (torch.optim.SGD(model[name].parameters(), 1e-2) for name in ("coder", "judge"))
    with tw.watch(model, [coder, judge], out=None, quiet=True, examine="listen") as watch:
        for _ in range(6):
            made = model["coder"](X)
            coder.zero_grad()
            F.softplus(-model["judge"](made)).mean().backward()
            coder.step()
            if not late:
                judge.zero_grad()
            (F.softplus(-model["judge"](X)) + F.softplus(model["judge"](made.detach()))).mean().backward()
            judge.step()
            judge.zero_grad()
    assert watch.session.failures == []
    found = [each for each in watch.findings() if each.code == "gradient.left_by_other_loss"]
    assert [each.where.module for each in found] == (["judge"] if late else [])
