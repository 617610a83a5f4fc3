"""What a schedule makes of the rate that an optimizer was made with."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

import trainwright as tw
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose


def by(factor: Callable[[int], float]) -> Callable[[SGD], LRScheduler]:
    return lambda optimizer: LambdaLR(optimizer, factor)


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (by(lambda step: min(1.0, (step + 1) / 5) * (1 - step / 20)), "held"),
        (lambda optimizer: CosineAnnealingLR(optimizer, 20), "held"),
        (lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=20), "not applicable"),
        (None, "not applicable"),
        (by(lambda step: (step + 1) * 5 if step < 5 else 1.0), "broken"),
        (by(lambda step: 1 + math.cos(math.pi * step / 20)), "broken"),
        (by(lambda step: 1.1**step), "broken"),
    ],
    ids=["warm-up", "cosine", "one cycle", "none", "multiplied", "twice", "grows"],
)
def test_no_schedule_goes_above_its_base(make: Callable[[SGD], LRScheduler] | None, state: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), 0.01)
    schedule = None if make is None else make(optimizer)
    with tw.watch(model, optimizer, scheduler=schedule, out=None, quiet=True, laws="cheap") as watch:
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
    laws = diagnose(Case(watch.records, finished=True)).laws
    assert next(each.state for each in laws if each.name == "program.base_is_the_highest") == state


@pytest.mark.parametrize(
    ("factor", "severity"),
    [
        (lambda step: (step + 1) / 10, "warning"),
        (lambda step: (step + 1) / 40, "info"),
        (lambda step: 0.1 * 1.1**step, "info"),
        (lambda step: 1.0 + step, "info"),
    ],
    ids=["past its top", "up to its own", "equal factors", "from its own"],
)
def test_a_warm_up_whose_top_is_missed(factor: Callable[[int], float], severity: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), 0.02)
    schedule = LambdaLR(optimizer, factor)
    with tw.watch(model, optimizer, scheduler=schedule, out=None, quiet=True, laws="cheap") as watch:
        for _ in range(50):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
            schedule.step()
    (course,) = (each for each in watch.findings() if each.code == "law.program.rate_has_its_course")
    assert course.severity == severity
