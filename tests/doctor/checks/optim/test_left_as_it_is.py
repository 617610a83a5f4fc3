"""What is not trained on purpose is an info: teachers, random networks, bodies that were trained before, adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.runs.records import Found

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second


def net(out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, out))


def trained(model: nn.Sequential, steps: int = 24) -> nn.Sequential:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
    return model


class Distilled(nn.Module):
    """Is compared with what another network says."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, net()

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.student(x), self.teacher(x).detach())


class Probed(nn.Module):
    """A head on features."""

    def __init__(self, body: nn.Sequential) -> None:
        super().__init__()
        self.body, self.head = body[:-1], nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.body(x)
        return F.cross_entropy(self.head(features), x[:, :4].argmax(1))


class Adapter(nn.Module):
    """``down`` stays as it is drawn (LoRA-FA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base.requires_grad_(False), nn.Linear(32, 4, bias=False).requires_grad_(False)
        self.up = nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Scored(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), x[:, :4].argmax(1))


def adapted() -> nn.Module:
    model = trained(net(), 200)
    model[2] = Adapter(model[2])  # type: ignore[arg-type]
    return Scored(model)


def frozen_inside() -> nn.Module:
    """Another first layer before what was trained."""
    model = trained(net())
    model.requires_grad_(False)
    model[0] = nn.Linear(8, 32)
    return Scored(model)


def orthogonal() -> nn.Module:
    """A classifier that is fixed."""
    model = net()
    nn.init.orthogonal_(model[4].weight)
    model[4].requires_grad_(False)
    return Scored(model)


def alarms(model: nn.Module, parameters: Callable[[nn.Module], object] = nn.Module.parameters) -> dict[str, Found]:
    optimizer = torch.optim.Adam(parameters(model), 1e-2)  # type: ignore[arg-type]
    with tw.watch(model, optimizer, out=None, quiet=True, checks=["gradient", "model", "optim", "precision"]) as watch:
        for _ in range(18):
            optimizer.zero_grad()
            model(torch.randn(32, 8)).backward()
            optimizer.step()
    assert watch.session.failures == []
    return {each.code: each for each in watch.findings() if each.severity != "info"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Distilled(net()),
        lambda: Distilled(trained(net())),
        lambda: Probed(trained(net())),
        adapted,
        frozen_inside,
        orthogonal,
    ],
    ids=["a random network", "a teacher", "a probe", "an adapter", "frozen inside", "orthogonal"],
)
def test_what_is_used_as_it_is(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert alarms(make()) == {}


def test_a_head_may_be_all_that_an_optimizer_holds() -> None:
    torch.manual_seed(0)
    assert alarms(Scored(trained(net())), lambda model: model.model[4].parameters()) == {}  # type: ignore[union-attr, index]
    fresh = alarms(Scored(net()), lambda model: model.model[4].parameters())  # type: ignore[union-attr, index]
    assert "optim.params_missing" in fresh


def test_a_body_that_was_not_trained_is_told_of() -> None:
    torch.manual_seed(0)
    assert "gradient.graph_cut" in alarms(Probed(net()))


def test_an_average_within_the_model_is_moved_by_the_loop() -> None:
    """Frozen, and held by the optimizer, which has no gradient for it."""
    torch.manual_seed(0)
    model = Distilled(net())
    model.teacher = copy.deepcopy(model.student).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, checks=["gradient", "model", "optim"]) as watch:
        for _ in range(8):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            (model(x) + F.cross_entropy(model.student(x), x[:, :4].argmax(1))).backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(model.teacher.parameters(), model.student.parameters()):
                    slow.lerp_(fast, 0.1)
    assert [each.code for each in watch.findings() if each.severity != "info"] == []
