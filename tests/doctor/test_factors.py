"""Constant factors inside of a model are left out on a replay, where they are far from 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.doctor.law_loops import CLASSES, WIDTH, as_it_is, found, states, watched
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.function.factors import factors_do_no_harm
from trainwright.doctor.function.facts import FactorsFacts, OddFactor, WithoutFactorFacts
from trainwright.doctor.law import Holds, NotApplicable
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined

HIDDEN = 24


class Net(nn.Module):
    """``change`` is applied to what the first layer has made."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.change(self.first(x))
        return self.head(torch.tanh(h) + self.second(torch.tanh(h)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda h: h, "not applicable"),
        (lambda h: 2 * h, "not applicable"),
        (lambda h: h * math.sqrt(HIDDEN), "not applicable"),
        (lambda h: h / HIDDEN, "not applicable"),
        (lambda h: 0.05 * h + 0.95 * h.detach(), "not applicable"),
        (lambda h: 8.0 * (h / 8.0), "held"),
        (lambda h: torch.sin(h * 1000), "broken"),
        (lambda h: 0.01 * h, "broken"),
        (lambda h: h / torch.tensor(100.0), "broken"),
    ],
    ids=["none", "twice", "a root", "a mean", "a gradient", "there and back", "1000", "a hundredth", "by a tensor"],
)
def test_a_factor_is_judged_by_what_is_learned_without_it(change: Callable[[Tensor], Tensor], state: str) -> None:
    watch = watched(as_it_is, steps=32, model=lambda: Net(change))
    assert states(watch, "function")["factors_do_no_harm"].state == state
    if state == "broken":
        where = found(watch, "law.function.factors_do_no_harm").where
        assert (where.source or "").startswith("test_factors.py:")


FACTS = WithoutFactorFacts(1, 32, "block", 0.1, "net.py:3", 3.0, 2.0, 2.9, 1.0, surely=True)


def case_of(*facts: FactorsFacts | WithoutFactorFacts, step: int = 32) -> Case:
    return Case(
        [
            Examined(time_s=0.0, step=step, experiment=each.experiment, values=strict(vars(each)))
            for each in facts
        ]
    )  # fmt: skip


ODD = FactorsFacts((OddFactor("block", 0.1, "net.py:3"),))


@each_row(
    ("case", "kinds"),
    [
        (case_of(), []),
        (case_of(FactorsFacts()), [NotApplicable]),
        (case_of(ODD, step=8), []),
        (case_of(ODD), [ExperimentRequest]),
        (case_of(ODD, FACTS), [Finding]),
        (case_of(ODD, replace(FACTS, surely=False)), [Holds]),
        (case_of(ODD, replace(FACTS, after_without=1.95)), [Holds]),
        (case_of(ODD, replace(FACTS, after=1.2)), [Holds]),
        (case_of(ODD, replace(FACTS, before=90.0, after=70.0)), [Finding]),
        (case_of(ODD, replace(FACTS, after=math.inf, surely=False)), [Finding]),
        (case_of(ODD, replace(FACTS, after=math.inf, after_without=math.inf, surely=False)), [Holds]),
    ],
    ids=lambda value: "",
)
def test_the_fall_of_the_loss_decides(case: Case, kinds: list[type]) -> None:
    assert [type(each) for each in factors_do_no_harm(case)] == kinds
