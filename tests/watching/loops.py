"""Runs loops unwatched and watched, and reads the results of the watch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import trainwright as tw

Watching = Callable[..., Any]
X, Y = torch.randn(32, 6, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3))


def sgd(*modules: nn.Module, lr: float = 0.1) -> Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=lr, momentum=0.9)


def both(loop: Callable[[Watching], Any], *, but: str = "", **options: Any) -> Any:
    """Runs a loop unwatched and watched. Fails unless both return the same bits. Returns the watch.

    Also fails for a critical finding other than ``but``, the fault that the loop really has.
    """
    watches: list[Any] = []

    def watching(*args: Any, **more: Any) -> Any:
        settings: dict[str, Any] = {**options, **more}
        watches.append(tw.watch(*args, out=None, quiet=True, **settings))
        return watches[-1]

    torch.manual_seed(5)
    alone = loop(lambda *args, **more: nullcontext())
    torch.manual_seed(5)
    watched = loop(watching)
    assert len(alone) == len(watched)
    for one, other in zip(alone, watched):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    for watch in watches:
        assert watch.session.failures == []
        assert {found.code for found in watch.findings() if found.severity == "critical"} <= {but}
    return watches[0]


def said(watch: Any) -> str:
    """Returns the symptoms of ``loop.unseen``: what the watch could not observe."""
    return " ".join(found.symptom for found in watch.findings() if found.code == "loop.unseen")


def weights(*modules: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for m in modules for p in m.state_dict().values()]


def exams(watch: Any, name: str) -> list[dict[str, Any]]:
    return [r.values for r in watch.records if getattr(r, "experiment", "") == name]


def replays(watch: Any) -> bool:
    """Returns True if every replay had the losses of the live step."""
    again = exams(watch, "again")
    return bool(again) and all(values.get("same_losses") for values in again)


def plain_step(model: Any, optimizer: Any) -> None:
    rows = torch.randperm(32)[:8]
    optimizer.zero_grad()
    F.cross_entropy(model(X[rows]), Y[rows]).backward()
    optimizer.step()


def plain_steps(model: Any, optimizer: Any, n: int = 10) -> None:
    for _ in range(n):
        plain_step(model, optimizer)


def loop_of(
    step: Callable[[Any, Optimizer], object],
    model_of: Callable[[], nn.Module] = net,
    optimizer_of: Callable[[Any], Optimizer] = sgd,
    n: int = 10,
) -> Callable[[Watching], list[Tensor]]:
    """Returns a loop for ``both`` that calls ``step`` ``n`` times with a new model, and returns the weights."""

    def loop(watching: Watching) -> list[Tensor]:
        model = model_of()
        optimizer = optimizer_of(model)
        with watching(model, optimizer):
            for _ in range(n):
                step(model, optimizer)
        return weights(model)

    return loop
