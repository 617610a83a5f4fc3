"""A Function of the user's own may run a module in its backward pass at inputs of its own: that is no checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.doctor.law_loops import WIDTH, watched


class Adjoint(torch.autograd.Function):
    """Four Euler steps; the way back goes through states that are integrated backwards (Chen et al., 2018)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, field: nn.Module, *weights: Tensor) -> Tensor:  # type: ignore[override]
        for _ in range(4):
            z = z + field(z) / 4
        ctx.field = field
        ctx.save_for_backward(z, *weights)
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        z, *weights = ctx.saved_tensors
        sums = [torch.zeros_like(weight) for weight in weights]
        for _ in range(4):
            with torch.enable_grad():
                at = z.detach().requires_grad_()
                moved = ctx.field(at)
                slope, *slopes = torch.autograd.grad(moved, (at, *weights), grad / 4)
            z, grad = z - moved.detach() / 4, grad + slope
            sums = [one + other for one, other in zip(sums, slopes, strict=True)]
        return grad, None, *sums


class Ode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = Adjoint.apply(x, self.field, *self.field.parameters())  # type: ignore[no-untyped-call]
        return self.last(z)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_an_adjoint_is_not_checkpointing_that_differs() -> None:
    codes = {each.code for each in watched(model=Ode).findings()}
    assert "gradient.recompute_mismatch" not in codes
