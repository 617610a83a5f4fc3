"""Inputs whose offset leaves float32 too few bits for their variation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.data.loops import exam, is_not_applicable, said
from trainwright.doctor.checks.precision.offset_of_input import offset_of_input
from trainwright.doctor.facts.data import BatchFacts, InputSpread


def test_steps_beside_the_deviation() -> None:
    def one(spacing: float) -> object:
        spread = InputSpread(shape=(8, 1), constant=False, mean=1e9, std=1000.0, absmax=1e9, spacing=spacing)
        return exam(1, BatchFacts(inputs=(spread,)))

    assert said(offset_of_input, one(64.0)) == ["warning"]
    assert not said(offset_of_input, one(0.1))
    assert is_not_applicable(offset_of_input, exam(1, BatchFacts()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((1_700_000_000 + torch.rand(64, 4, dtype=torch.float64) * 86400).float(), True),
        ((4_500_000 + torch.randn(64, 4, dtype=torch.float64) * 10).float(), True),
        (torch.rand(64, 4) * 86400, False),
        (255 * torch.rand(64, 4), False),
        ((100 + torch.rand(64, 4)).bfloat16(), False),
    ],
    ids=["time stamps", "coordinates", "seconds of a day", "pixels", "bfloat16"],
)
def test_inputs(times: Tensor, expected: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(times.dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-20)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all", checks=["precision"]) as watch:
        for rows in times.split(16):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    assert ("precision.offset_of_input" in {each.code for each in watch.findings()}) is expected
