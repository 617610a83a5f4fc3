"""A small loop that a law is judged on: healthy as it is, with one thing put in or replaced for each violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import trainwright as tw
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.law import LawState
from trainwright.runlog.records import Found

CLASSES, WIDTH, BATCH = 4, 8, 16


def net(dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, CLASSES))


@dataclass
class Loop:
    """What a violation may replace. ``step`` is the number of the step in progress, from 0; ``end`` comes after it."""

    model: nn.Module
    optimizer: Optimizer
    x: Tensor
    y: Tensor
    forward: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    batch: Callable[[int], Tensor] = field(default=lambda step: torch.arange(step * BATCH, (step + 1) * BATCH) % 128)
    begin: Callable[[int], object] = lambda step: None
    before_update: Callable[[int], object] = lambda step: None
    end: Callable[[int], object] = lambda step: None


Change = Callable[[Loop], object]


def as_it_is(loop: Loop) -> None:
    """The healthy loop."""


def watched(
    change: Change = as_it_is,
    *,
    steps: int = 14,
    model: Callable[[], nn.Module] = net,
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW,
    lr: float = 1e-2,
    dtype: torch.dtype = torch.float32,
    laws: str = "all",
) -> tw.Watch:
    """Runs the loop under a watch with the change, and returns the watch.

    With the ``laws`` that are cheap no step is run again: a third of what all of them cost.
    """
    torch.manual_seed(0)
    x = torch.randn(128, WIDTH, dtype=dtype)
    y = (x.float() @ torch.randn(WIDTH, CLASSES)).argmax(1)
    made = model().to(dtype)
    loop = Loop(made, optimizer(made.parameters(), lr=lr), x, y, made)
    with tw.watch(made, loop.optimizer, out=None, quiet=True, laws=laws) as watch:
        change(loop)
        for step in range(steps):
            loop.begin(step)
            rows = loop.batch(step)
            loop.optimizer.zero_grad()
            loop.loss(loop.forward(loop.x[rows]), loop.y[rows]).backward()
            loop.before_update(step)
            loop.optimizer.step()
            loop.end(step)
    assert watch.session.failures == []
    return watch


def states(watch: tw.Watch, family: str) -> dict[str, LawState]:
    """What became of each law of a family, by its name without the family."""
    laws = diagnose(Case(watch.records, finished=True)).laws
    return {state.name.partition(".")[2]: state for state in laws if state.name.startswith(f"{family}.")}


def broken(watch: tw.Watch, family: str) -> set[str]:
    """The laws of a family that are broken."""
    return {name for name, state in states(watch, family).items() if state.state == "broken"}


def found(watch: tw.Watch, code: str) -> Found:
    """The finding with this code."""
    return next(each for each in watch.findings() if each.code == code)
