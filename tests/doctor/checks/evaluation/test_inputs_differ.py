"""Inputs of an evaluation that are prepared differently are reported where its loss suffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.data.loops import exam, said, steps, table, trained, warned
from trainwright.doctor.checks.evaluation.inputs_differ import inputs_differ
from trainwright.doctor.facts.evaluation import EvaluationFacts, Likeness

X, Y = table(256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "codes"),
    [
        (lambda x: x, []),
        (lambda x: x + 0.5 * torch.randn_like(x), []),
        (lambda x: x * (torch.rand_like(x) > 0.3), []),
        (lambda x: x[:8], []),
        (lambda x: 20 * x, ["evaluation.inputs_differ"]),
        (lambda x: 100 * x + 700, ["evaluation.inputs_differ"]),
    ],
    ids=["same", "noise", "erasing", "few rows", "other units", "not normalised"],
)
def test_evaluated_inputs(prepare: Callable[[Tensor], Tensor], codes: list[str]) -> None:
    def end(model: nn.Module, step: int) -> None:
        if step == 11:
            with torch.no_grad():
                rows = prepare(X[128:])
                assert F.cross_entropy(model(rows), Y[128 : 128 + len(rows)]).item() >= 0.0

    batches = ((X[:128].roll(8 * step, 0)[:64], Y[:128].roll(8 * step, 0)[:64]) for step in range(14))
    found = warned(trained(batches, end=end), ("evaluation.",))
    assert found == codes


@pytest.mark.parametrize(
    ("likeness", "loss", "severities"),
    [
        (Likeness(rows=99, shift=4.0, ratio=1.0), 2.0, ["warning"]),
        (Likeness(rows=99, shift=0.1, ratio=0.25), 2.0, ["warning"]),
        (Likeness(rows=99, shift=4.0, ratio=1.0), 0.5, ["info"]),
        (Likeness(rows=99, shift=0.3, ratio=1.5), 2.0, []),
    ],
)
def test_only_a_worse_loss_makes_it_a_warning(likeness: Likeness, loss: float, severities: list[str]) -> None:
    facts = EvaluationFacts(after=16, rows=99, losses=(loss,), likeness=likeness)
    assert said(inputs_differ, *steps(0.6, 16), exam(16, facts)) == severities
