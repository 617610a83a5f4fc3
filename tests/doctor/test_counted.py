"""Rows of a batch that never have a part in the loss are found by their place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.law import Holds, NotApplicable
from trainwright.doctor.loss.counted import every_row_counts
from trainwright.doctor.loss.facts import CountedFacts
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.slow
@each_row(
    ("loss", "state"),
    [
        (F.cross_entropy, "held"),
        (lambda out, y: F.relu(1 - out.gather(1, y[:, None])).mean(), "held"),
        (lambda out, y: F.cross_entropy(out[:-1], y[:-1]), "not applicable"),
        (lambda out, y: F.cross_entropy(out[:-2], y[:-2]), "broken"),
        (lambda out, y: F.cross_entropy(out[::2], y[::2]), "broken"),
        (lambda out, y: F.cross_entropy(out[:1], y[:1]), "broken"),
        (lambda out, y: F.cross_entropy(torch.cat([out[:4].detach(), out[4:]]), y), "broken"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_a_slice_leaves_out(loss: Loss, state: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="loss.every_row_counts") as watch:
        for n in range(4):
            rows = slice(16 * n, 16 * n + 16)
            optimizer.zero_grad()
            loss(model(X[rows]), Y[rows]).backward()
            optimizer.step()
    assert watch.session.failures == []
    states = {each.name: each.state for each in diagnose(Case(watch.records, finished=True)).laws}
    assert states["loss.every_row_counts"] == state


def case_of(*idle: tuple[int, ...], are_samples: bool = True, moves: float = 1.0) -> Case:
    facts = [strict(vars(CountedFacts(16, each, are_samples, moves * n))) for n, each in enumerate(idle)]
    return Case(
        [Examined(time_s=0.0, step=n, experiment="rows_that_count", values=each) for n, each in enumerate(facts, 1)]
    )


@each_row(
    ("case", "kind"),
    [
        (case_of(()), Holds),
        (case_of((3, 4), (5,)), Holds),
        (case_of((3, 4), (4,), (4, 9)), Finding),
        (case_of((15,), (15,), (15,)), Finding),
        (case_of((15,), (15,), (15,), are_samples=False), NotApplicable),
        (case_of((3,), (3,), (3,), are_samples=False, moves=0.0), NotApplicable),
        (case_of((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 9, 10), (1, 4, 5, 11)), NotApplicable),
    ],
    ids=lambda value: "",
)
def test_rows_that_are_left_out_for_what_they_hold(case: Case, kind: type) -> None:
    [verdict] = [each for each in every_row_counts(case) if not isinstance(each, ExperimentRequest)]
    assert isinstance(verdict, kind)
