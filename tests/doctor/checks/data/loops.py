"""Small loops over some batches, and the results of one check for given records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.doctor.check import Check, NotApplicable
from trainwright.doctor.context import RunContext
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.runs.json_values import strict
from trainwright.runs.records import Examined, Watched

Batches = Iterable[tuple[Tensor, Tensor]]


def table(rows: int = 128, width: int = 6) -> tuple[Tensor, Tensor]:
    """Rows with two classes."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def trained(batches: Batches, *, end: Callable[[nn.Module, int], object] = lambda model, step: None) -> tw.Watch:
    """Train on the batches without replays. ``end`` is called after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            end(model, step)
    assert watch.session.failures == []
    return watch


def warned(watch: tw.Watch, topics: tuple[str, ...] = ("data.", "evaluation.")) -> list[str]:
    """The codes of warnings about data and evaluations."""
    return [each.code for each in watch.findings() if each.severity != "info" and each.code.startswith(topics)]


def exam(step: int, facts: Any) -> Examined:
    """The record of a measurement."""
    return Examined(time_s=0.0, step=step, experiment=type(facts).experiment, values=dict(strict(vars(facts))))


def steps(loss: float, number: int) -> list[Watched]:
    return [Watched(time_s=0.0, step=step, loss=loss, grad_norm=1.0, lr=1e-3) for step in range(1, number + 1)]


def results(check: Check, *records: Any, finished: bool = False) -> list[Any]:
    run = RunContext(records, finished=finished)
    return list(check.results(run))


def said(check: Check, *records: Any) -> list[str]:
    """The severities of the findings of a check."""
    return [each.found.severity for each in results(check, *records) if isinstance(each, Finding)]


def requested(check: Check, *records: Any) -> list[str]:
    return [each.experiment for each in results(check, *records) if isinstance(each, ExperimentRequest)]


def is_not_applicable(check: Check, *records: Any) -> bool:
    return any(isinstance(each, NotApplicable) for each in results(check, *records))
