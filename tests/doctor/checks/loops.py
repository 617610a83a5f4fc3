"""A small watched loop for tests of checks. It is healthy unless an argument replaces a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.doctor.check import Check
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.finding import ExperimentRequest
from trainwright.runs.json_values import strict
from trainwright.runs.records import Examined, Found, Watched

CLASSES, WIDTH, BATCH = 4, 8, 16


def mlp(*layers: nn.Module) -> nn.Sequential:
    """Returns a classifier with ``layers`` between its two linear layers."""
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), *layers, nn.Linear(32, CLASSES))


def watched(
    model: nn.Module,
    *,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    inputs: Callable[[Tensor], Tensor] = lambda x: x,
    steps: int = 16,
    before_update: Callable[[], object] = lambda: None,
    after_update: Callable[[], object] = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
    checks: str | Sequence[str] = "default",
) -> tw.Watch:
    """Train the model on a linear task of four classes."""
    torch.manual_seed(0)
    x = torch.randn(128, WIDTH)
    y = (x @ torch.randn(WIDTH, CLASSES)).argmax(1)
    x = inputs(x)
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, checks=checks) as watch:
        for step in range(steps):
            rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(x)
            optimizer.zero_grad()
            made = loss(model, x[rows], y[rows]) if loss is not None else F.cross_entropy(model(x[rows]), y[rows])
            made.backward()
            before_update()
            optimizer.step()
            after_update()
    assert watch.session.failures == []
    return watch


def alarms(watch: tw.Watch) -> list[str]:
    """The codes of warnings and critical findings."""
    return [each.code for each in watch.findings() if each.severity != "info"]


def found(watch: tw.Watch, code: str) -> Found:
    """The finding with this code."""
    return next(each for each in watch.findings() if each.code == code)


def made_of(
    check: Check, *facts: tuple[int, object], steps: Sequence[Watched] = (), finished: bool = True
) -> list[Found]:
    """Returns the findings of one check for measurements, given as (step, facts)."""
    seen = [Examined(time_s=0.0, step=n, experiment=f.experiment, values=strict(vars(f))) for n, f in facts]  # type: ignore[attr-defined]
    diagnosis = diagnose(RunContext([*steps, *seen], finished=finished), [check])
    return [each.found for each in diagnosis.findings if each.found.code == check.code]


def requested(check: Check, *facts: tuple[int, object]) -> list[ExperimentRequest]:
    """The experiments that one check requests."""
    seen = [Examined(time_s=0.0, step=n, experiment=f.experiment, values=strict(vars(f))) for n, f in facts]  # type: ignore[attr-defined]
    results = check.results(RunContext(seen))
    return [each for each in results if isinstance(each, ExperimentRequest)]
