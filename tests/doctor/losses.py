"""A loop whose loss a test gives, and what the laws of the loss say of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import LAWS
from trainwright.doctor.finding import Finding
from trainwright.doctor.law import Verdict

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y, R = X[:, :3].argmax(1), X[:, :3] * 0.5
JUDGES = {law.name.removeprefix("loss."): law.judge for law in LAWS if law.name.startswith("loss.")}
Loss = Callable[[Tensor], Tensor]


def case_of(loss_of: Loss, dtype: torch.dtype = torch.float32, steps: int = 1) -> Case:
    """The records of a run with this loss of the outputs (16, 3)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="loss") as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = loss_of(model(X[:16]))
            loss.backward()
            optimizer.step()
    assert watch.session.failures == []
    return Case(watch.records)


def ended(case: Case) -> Case:
    """The same of a run that has ended."""
    return Case(case.records, finished=True)


def verdicts(case: Case, law: str) -> list[Verdict]:
    return [*JUDGES[law](case)]


def broken(case: Case, law: str) -> list[Finding]:
    return [each for each in verdicts(case, law) if isinstance(each, Finding) and each.found.severity != "info"]


Y16, R16 = Y[:16], R[:16]
