"""Fresh weights that nobody trains are found after any initialisation, and what may be frozen is left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.doctor.law_loops import CLASSES, WIDTH, Change, Loop, found, states, watched
from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.law import Holds
from trainwright.doctor.vitals.facts import FrozenFacts, FrozenTensor, VitalsFacts
from trainwright.doctor.vitals.frozen import fresh_weights_are_trained
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second


class WithBranch(nn.Module):
    """A layer in the middle, and a branch beside it that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.up = nn.Parameter(torch.zeros(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        h = self.middle(h).relu() + h[:, :4] @ self.up.T
        out: Tensor = self.head(h)
        return out


def trained_before() -> nn.Module:
    """No weight of it has the values of an initialisation."""
    model = WithBranch()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.1)
            p.add_(torch.outer(p[:, 0], p[0]) * 100 if p.dim() > 1 else 0.0)
    return model


def trained_a_little() -> nn.Module:
    """Only a bias shows it."""
    model = WithBranch()
    model.middle.bias.data.mul_(1.5)
    return model


class Corrected(nn.Module):
    """``base`` stays as it is."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(32, 4), nn.Linear(4, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def with_adapters() -> nn.Module:
    model = WithBranch()
    model.middle, model.head = Corrected(model.middle), Corrected(model.head)  # type: ignore[assignment]
    return model


class Masked(nn.Module):
    """Which of its random weights are used is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 32**0.5)
        self.scores = nn.Parameter(torch.zeros(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scores.sigmoid()).T


def with_mask() -> nn.Module:
    model = WithBranch()
    model.middle = Masked()  # type: ignore[assignment]
    return model


def freezing(*names: str) -> Change:
    def change(loop: Loop) -> None:
        for name, p in loop.model.named_parameters():
            p.requires_grad_(not name.startswith(names) if names else True)

    return change


@pytest.mark.parametrize("name", ["middle", "head", "up"])
def test_fresh_weights_that_nobody_trains(name: str) -> None:
    watch = watched(freezing(name), model=WithBranch, steps=17)
    law = found(watch, "law.vitals.fresh_weights_are_trained")
    assert (law.severity, law.where.module) == ("warning", "" if name == "up" else name)


@pytest.mark.parametrize(
    "init", [nn.init.kaiming_normal_, partial(nn.init.trunc_normal_, std=0.02), nn.init.orthogonal_]
)
def test_weights_are_fresh_after_any_initialisation(init: Callable[[Tensor], Tensor]) -> None:
    def model() -> nn.Module:
        made = WithBranch()
        init(made.middle.weight)
        return made

    watch = watched(freezing("middle"), model=model, steps=17)
    assert found(watch, "law.vitals.fresh_weights_are_trained").where.module == "middle"


class Tied(nn.Module):
    """Its last layer has the weights of its first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.last(self.middle(self.first(x)).tanh()))
        return out


def test_tied_weights_lie_where_each_of_their_modules_lies() -> None:
    watch = watched(freezing("first.weight"), model=Tied, steps=17)
    assert found(watch, "law.vitals.fresh_weights_are_trained").where.module == "first"


def test_what_matters_in_the_end_is_asked_for_in_the_end() -> None:
    def case_of(*shares: float) -> Case:
        vitals = VitalsFacts(steps=40, updates=40, tensors=4, frozen_still=1)
        rows = [FrozenTensor(name="key.weight", is_zero=False, is_behind=True, is_last=False, share=s) for s in shares]
        facts = [vitals, *(FrozenFacts(tensors=(row,)) for row in rows)]
        seen = [Examined(time_s=0.0, step=40, experiment=f.experiment, values=strict(vars(f))) for f in facts]
        return Case(seen, finished=True)

    assert [type(each) for each in fresh_weights_are_trained(case_of(0.01))] == [ExperimentRequest, Holds]
    for shares in ((0.01, 0.2), (0.2, 0.01)):
        [law] = [each for each in fresh_weights_are_trained(case_of(*shares)) if isinstance(each, Finding)]
        assert law.found.severity == "warning"


def of_few_weights() -> nn.Module:
    """Its head has 16 weights."""
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def of_few_trained() -> nn.Module:
    """No weight of it has the values of an initialisation."""
    model = of_few_weights()
    for p in model.parameters():
        p.data.mul_(1.5)
    return model


def test_few_weights_that_nobody_trains() -> None:
    watch = watched(freezing("2"), model=of_few_weights, steps=17)
    assert found(watch, "law.vitals.fresh_weights_are_trained").where.module == "2"


@pytest.mark.parametrize(
    ("change", "model", "state"),
    [
        (freezing("2"), of_few_trained, "held"),
        (freezing(), WithBranch, "not applicable"),
        (freezing("first"), WithBranch, "held"),
        (freezing("middle", "head", "up"), trained_before, "held"),
        (freezing("middle"), trained_a_little, "held"),
        (freezing("middle.base", "head.base"), with_adapters, "held"),
        (freezing("middle.weight"), with_mask, "held"),
    ],
)
def test_what_may_be_frozen(change: Change, model: Callable[[], nn.Module], state: str) -> None:
    watch = watched(change, model=model, steps=17)
    assert states(watch, "vitals")["fresh_weights_are_trained"].state == state
