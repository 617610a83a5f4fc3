"""Weights that begin far beyond the others of their tensor are brought nearer to them on a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.doctor.law_loops import CLASSES, WIDTH, as_it_is, found, states, watched
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.function.facts import WithoutOutliersFacts
from trainwright.doctor.function.first_steps import weights_begin_alike
from trainwright.doctor.law import Holds, NotApplicable
from trainwright.doctor.loss.facts import ComparedFacts, ComparisonsFacts
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined


class Net(nn.Module):
    """``weights`` are those of the layer in the middle."""

    def __init__(self, weights: Callable[[], Tensor]) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, 24), nn.Parameter(weights())
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.relu(self.first(x)) @ self.middle))


def partly(first: int, last: int, size: float) -> Callable[[], Tensor]:
    """Some rows of the memory were never written to."""

    def make() -> Tensor:
        weights = 0.2 * torch.randn(24, 24)
        weights[first:last] = size * torch.randn(last - first, 24).exp()
        return weights

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "state"),
    [
        (lambda: 0.2 * torch.randn(24, 24), "not applicable"),
        (lambda: torch.eye(24) + 1e-3 * torch.randn(24, 24), "not applicable"),
        (lambda: nn.init.sparse_(torch.empty(24, 24), sparsity=0.9), "not applicable"),
        (lambda: 0.2 / torch.randn(24, 24), "held"),
        (partly(3, 6, 30.0), "broken"),
        (partly(0, 2, 300.0), "broken"),
        (partly(5, 8, 1e3), "broken"),
    ],
    ids=["normal", "a diagonal", "sparse", "heavy tails without harm", "three rows", "two rows", "larger ones"],
)
def test_outliers_are_judged_by_what_is_learned_without(weights: Callable[[], Tensor], state: str) -> None:
    watch = watched(as_it_is, steps=32, model=lambda: Net(weights))
    assert states(watch, "function")["weights_begin_alike"].state == state
    if state == "broken":
        assert found(watch, "law.function.weights_begin_alike").symptom.startswith("the largest weight of middle")


FACTS = WithoutOutliersFacts(1, 32, "net.weight", 300.0, 3.0, 2.0, 2.9, 1.0, surely=True)


def case_of(*facts: WithoutOutliersFacts) -> Case:
    values = [strict(vars(each)) for each in facts]
    return Case([Examined(time_s=0.0, step=32, experiment=WithoutOutliersFacts.experiment, values=v) for v in values])


@each_row(
    ("case", "kinds"),
    [
        (case_of(), []),
        (case_of(WithoutOutliersFacts(32, 32)), [NotApplicable]),
        (case_of(FACTS), [Finding]),
        (case_of(replace(FACTS, surely=False)), [Holds]),
        (case_of(replace(FACTS, after_without=1.95)), [Holds]),
        (Case([Examined(time_s=0.0, step=32, experiment="vitals", values={})]), [ExperimentRequest]),
    ],
    ids=lambda value: "",
)
def test_the_fall_of_the_loss_decides(case: Case, kinds: list[type]) -> None:
    assert [type(each) for each in weights_begin_alike(case)] == kinds


@pytest.mark.parametrize(("value", "kind"), [(0.3, NotApplicable), (2.0, ExperimentRequest)], ids=["trained", "fresh"])
def test_a_model_that_was_trained_before_is_left_alone(value: float, kind: type) -> None:
    first = ComparisonsFacts((ComparedFacts("cross_entropy", None, value, 2.0, 2.0, 16),))
    looks = [
        Examined(time_s=0.0, step=1, experiment=ComparisonsFacts.experiment, values=strict(vars(first))),
        Examined(time_s=0.0, step=32, experiment="vitals", values={}),
    ]
    assert [type(each) for each in weights_begin_alike(Case(looks))] == [kind]
