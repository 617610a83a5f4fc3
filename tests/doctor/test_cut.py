"""Data that a model rounds or cuts off are given whole on a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.doctor.law_loops import WIDTH, as_it_is, found, net, states, watched
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.function.facts import WithoutCutFacts
from trainwright.doctor.function.first_steps import data_come_whole
from trainwright.doctor.law import Holds, NotApplicable
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined


class Net(nn.Module):
    """``change`` is applied to what the model is given."""

    def __init__(self, change: Callable[[Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.change, self.widen, self.body = change, nn.Linear(width, WIDTH), net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.widen(self.change(x)))


def in_two_parts(x: Tensor) -> Tensor:
    return torch.cat([x.relu(), (-x).relu()], dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "width", "state"),
    [
        (lambda x: x, WIDTH, "not applicable"),
        (lambda x: x.clamp(-3.0, 3.0), WIDTH, "not applicable"),
        (lambda x: (16 * x).round() / 16, WIDTH, "not applicable"),
        (in_two_parts, 2 * WIDTH, "not applicable"),
        (torch.relu, WIDTH, "broken"),
        (lambda x: (0.4 * x).to(torch.int64).float(), WIDTH, "broken"),
        (lambda x: x.abs(), WIDTH, "broken"),
    ],
    ids=["none", "outliers", "fine steps", "two parts", "an activation", "whole numbers", "a sign"],
)
def test_what_is_cut_off_is_judged_by_what_is_learned_without(
    change: Callable[[Tensor], Tensor], width: int, state: str
) -> None:
    watch = watched(as_it_is, steps=32, model=lambda: Net(change, width))
    assert states(watch, "function")["data_come_whole"].state == state
    if state == "broken":
        source = found(watch, "law.function.data_come_whole").where.source or ""
        assert source.startswith("test_cut.py:")


FACTS = WithoutCutFacts(1, 32, "", "relu", "net.py:3", 3.0, 2.0, 2.9, 1.0, surely=True)


def case_of(*facts: WithoutCutFacts) -> Case:
    values = [strict(vars(each)) for each in facts]
    return Case([Examined(time_s=0.0, step=32, experiment=WithoutCutFacts.experiment, values=v) for v in values])


@each_row(
    ("case", "kinds"),
    [
        (case_of(), []),
        (case_of(WithoutCutFacts(32, 32)), [NotApplicable]),
        (case_of(FACTS), [Finding]),
        (case_of(replace(FACTS, surely=False)), [Holds]),
        (case_of(replace(FACTS, after_without=1.95)), [Holds]),
        (Case([Examined(time_s=0.0, step=32, experiment="vitals", values={})]), [ExperimentRequest]),
    ],
    ids=lambda value: "",
)
def test_the_fall_of_the_loss_decides(case: Case, kinds: list[type]) -> None:
    assert [type(each) for each in data_come_whole(case)] == kinds
