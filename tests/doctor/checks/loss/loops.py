"""A small watched loop, for the tests of the checks of the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

import trainwright as tw

WIDTH, CLASSES, BATCH = 6, 3, 16
_generator = torch.Generator().manual_seed(0)
X = torch.randn(4 * BATCH, WIDTH, generator=_generator)
Y = X[:, :CLASSES].argmax(1)
R = X @ torch.randn(WIDTH, generator=_generator)
"""Regression targets of both signs."""
Loss: TypeAlias = Callable[[nn.Module, slice], Tensor]
"""The loss of a model for some of the rows."""


def codes(
    loss: Loss,
    *,
    outputs: int = CLASSES,
    model: nn.Module | None = None,
    further: Sequence[nn.Module] = (),
    steps: int = 16,
    lr: float = 0.05,
    maximize: bool = False,
) -> set[str]:
    """Trains a model (default: a linear one) on ``loss``. Returns the codes of warnings and critical findings."""
    torch.manual_seed(0)
    model = model or nn.Linear(WIDTH, outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, maximize=maximize)
    with tw.watch([model, *further], optimizer, out=None, quiet=True, checks=["loss"]) as watch:
        for n in range(steps):
            optimizer.zero_grad()
            loss(model, slice(BATCH * (n % 4), BATCH * (n % 4) + BATCH)).backward()
            optimizer.step()
    assert watch.session.failures == []
    assert not [each for each in watch.findings() if each.code == "doctor.failed"]
    return {each.code for each in watch.findings() if each.severity != "info"}
