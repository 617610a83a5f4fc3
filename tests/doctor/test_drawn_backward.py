"""A backward pass that draws random numbers is told by its mean: an estimator, or wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.runlog.records import Found

pytestmark = pytest.mark.slow  # a watched loop for each function


class Shake(torch.autograd.Function):
    """A mixture of two that is drawn anew on the way back (Gastaldi, 2017)."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return torch.lerp(one, other, torch.rand(len(one), 1).to(one))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        share = torch.rand(len(grad), 1).to(grad)
        return (1 - share) * grad, share * grad


class Square(torch.autograd.Function):
    """Its gradient is changed at random."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x + other

    @staticmethod
    def changed(grad: Tensor) -> Tensor:
        raise NotImplementedError

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        drawn = cls.changed(grad)
        return 2 * x * drawn, drawn


class RoundedBack(Square):
    """Rounds gradients up or down at random, right in the mean (Chmiel et al., 2021)."""

    @staticmethod
    def changed(grad: Tensor) -> Tensor:
        grid = grad.abs().amax() / 4
        return torch.floor(grad / grid + torch.rand_like(grad)) * grid


class SampledBack(Square):
    """Keeps half of the gradients, and doubles these (Oktay et al., 2020)."""

    @staticmethod
    def changed(grad: Tensor) -> Tensor:
        return 2 * (torch.rand_like(grad) < 0.5) * grad


class Forgetful(Square):
    """Keeps half of the gradients, and forgets to double them."""

    @staticmethod
    def changed(grad: Tensor) -> Tensor:
        return (torch.rand_like(grad) < 0.5) * grad


class Mixed(Shake):
    """The other one gets the share of the first twice."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        share = torch.rand(len(grad), 1).to(grad)
        return (1 - share) * grad, 2 * share * grad


class Branches(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.one, self.other, self.head, self.function = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 3), function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.function.apply(self.one(x), self.other(x)))  # type: ignore[no-untyped-call]
        return out


def wrong_backward_of(function: type[torch.autograd.Function]) -> Found:
    """What is said of the backward pass of a Function of two arguments."""
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))
    model = Branches(function)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="gradient") as watch:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {each.code: each for each in watch.findings()}["gradient.wrong_backward"]


@pytest.mark.parametrize(
    ("function", "severity"),
    [(Shake, "info"), (RoundedBack, "info"), (SampledBack, "info"), (Forgetful, "critical"), (Mixed, "critical")],
)
def test_a_backward_pass_that_draws(function: type[torch.autograd.Function], severity: str) -> None:
    found = wrong_backward_of(function)
    assert (found.severity, found.where.op) == (severity, function.__name__)
    assert "in the mean" in found.symptom


class Pruned(torch.autograd.Function):
    """Leaves out the smaller half of its argument; the backward pass pulls on that half (SR-STE, Zhou et al., 2021)."""

    share = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, kept := (x.abs() > x.abs().median()).to(x))
        return x * kept + other

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, kept = ctx.saved_tensors
        return cls.share * grad + 0.1 * (1 - kept) * x, grad


class Weakened(Pruned):
    """And gives the other half too little."""

    share = 0.7


@pytest.mark.parametrize(("function", "severity"), [(Pruned, "info"), (Weakened, "critical")])
def test_a_surrogate_where_the_forward_pass_stands_still(
    function: type[torch.autograd.Function], severity: str
) -> None:
    assert wrong_backward_of(function).severity == severity
