"""Divisors within a model that pass through 0 are kept away from it on a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.doctor.law_loops import CLASSES, WIDTH, as_it_is, found, states, watched
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.function.facts import WithoutPolesFacts
from trainwright.doctor.function.first_steps import divisors_stay_off_0
from trainwright.doctor.law import Holds, NotApplicable
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined


class Net(nn.Module):
    """``join`` makes one of what two layers have made."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.join = join
        self.one, self.other, self.head = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.join(self.one(x), self.other(x)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("join", "state"),
    [
        (lambda a, b: torch.relu(a) * b, "not applicable"),
        (lambda a, b: a / F.softplus(b), "not applicable"),
        (lambda a, b: a / b.norm(dim=-1, keepdim=True), "not applicable"),
        (lambda a, b: a / (1 + b * b), "not applicable"),
        (lambda a, b: a / b, "broken"),
        (lambda a, b: 1 / b, "broken"),
        (lambda a, b: a * torch.reciprocal(torch.tanh(b)), "broken"),
    ],
    ids=["a product", "softplus", "a norm", "one and a square", "a quotient", "of a number", "a reciprocal"],
)
def test_a_divisor_is_judged_by_what_is_learned_with_it_off_0(
    join: Callable[[Tensor, Tensor], Tensor], state: str
) -> None:
    watch = watched(as_it_is, steps=32, model=lambda: Net(join))
    assert states(watch, "function")["divisors_stay_off_0"].state == state
    if state == "broken":
        source = found(watch, "law.function.divisors_stay_off_0").where.source or ""
        assert source.startswith("test_poles.py:")


FACTS = WithoutPolesFacts(1, 32, "", "net.py:3", 0.01, 3.0, 2.0, 2.9, 1.0, surely=True)


def case_of(*facts: WithoutPolesFacts) -> Case:
    values = [strict(vars(each)) for each in facts]
    return Case([Examined(time_s=0.0, step=32, experiment=WithoutPolesFacts.experiment, values=v) for v in values])


@each_row(
    ("case", "kinds"),
    [
        (case_of(), []),
        (case_of(WithoutPolesFacts(32, 32)), [NotApplicable]),
        (case_of(FACTS), [Finding]),
        (case_of(replace(FACTS, surely=False)), [Holds]),
        (case_of(replace(FACTS, after_without=1.95)), [Holds]),
        (Case([Examined(time_s=0.0, step=32, experiment="vitals", values={})]), [ExperimentRequest]),
    ],
    ids=lambda value: "",
)
def test_the_fall_of_the_loss_decides(case: Case, kinds: list[type]) -> None:
    assert [type(each) for each in divisors_stay_off_0(case)] == kinds
