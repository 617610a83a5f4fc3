"""model.running_statistics_stand_still on faulty and on healthy programs."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.loops import CLASSES, WIDTH, alarms, found, mlp, watched

CODE = "model.running_statistics_stand_still"
pytestmark = pytest.mark.slow


class OwnNorm(nn.Module):
    """Has running statistics, and gives others to the function that normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))
        self.register_buffer("running_mean", torch.zeros(32))
        self.register_buffer("running_var", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
        return F.batch_norm(x, torch.zeros(32), torch.ones(32), self.weight, self.bias, training=True)


class OverPlaces(nn.Module):
    """An InstanceNorm over the places of a sequence."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(1, 8), nn.Linear(8, CLASSES)
        self.norm = nn.InstanceNorm1d(8, affine=True, momentum=momentum, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x[..., None]).transpose(1, 2)).relu().mean(2))


def untracked() -> nn.Module:
    norm = nn.BatchNorm1d(32)
    norm.track_running_stats = False
    return mlp(norm)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: mlp(nn.BatchNorm1d(32, momentum=0.0)), "momentum is 0"),
        (lambda: mlp(nn.BatchNorm1d(32, momentum=0.0, affine=False)), "momentum is 0"),
        (lambda: OverPlaces(0.0), "momentum is 0"),
        (untracked, "without them"),
        (lambda: mlp(OwnNorm()), "without them"),
    ],
    ids=["momentum", "no weights", "instances", "not tracked", "others"],
)
def test_statistics_that_never_move(make: Callable[[], nn.Module], cause: str) -> None:
    torch.manual_seed(0)
    watch = watched(make())
    assert CODE in alarms(watch)
    assert cause in found(watch, CODE).cause


@pytest.mark.parametrize("when", ["before", "after"])
def test_statistics_that_are_put_back(when: str) -> None:
    torch.manual_seed(0)
    model = mlp(nn.BatchNorm1d(32))
    first = {name: each.clone() for name, each in model.named_buffers()}

    def put_back() -> None:
        model.load_state_dict(first, strict=False)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if when == "before":
            put_back()
        return F.cross_entropy(model(x), y)

    watch = watched(model, loss=loss, after_update=put_back if when == "after" else lambda: None)
    assert CODE in alarms(watch)
    assert "put back" in found(watch, CODE).cause


class TwoDomains(nn.Module):
    """A norm for each of two domains, of which only the first is trained here."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norms = nn.Linear(WIDTH, 32), nn.ModuleList([nn.BatchNorm1d(32), nn.BatchNorm1d(32)])
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norms[0](self.stem(x)).relu())


def frozen() -> nn.Module:
    body = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32)).requires_grad_(False).eval()
    return nn.Sequential(body, nn.ReLU(), nn.Linear(32, CLASSES))


def statistics_of_the_batch() -> nn.Module:
    """As test-time adaptation prepares a model: evaluation normalises by the batch, too."""
    norm = nn.BatchNorm1d(32, track_running_stats=False)
    assert norm.running_mean is None
    return mlp(norm)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mlp(nn.BatchNorm1d(32)),
        lambda: mlp(nn.BatchNorm1d(32, momentum=1e-4)),
        lambda: mlp(nn.BatchNorm1d(32, momentum=None)),
        lambda: OverPlaces(0.1),
        statistics_of_the_batch,
        frozen,
    ],
    ids=["usual", "slow", "mean of all", "instances", "no statistics", "frozen"],
)
def test_healthy_norms(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    assert CODE not in alarms(watched(make()))


def test_a_norm_that_is_not_called() -> None:
    torch.manual_seed(0)
    assert CODE not in alarms(watched(TwoDomains()))


def test_a_second_pass_may_leave_the_statistics_alone() -> None:
    """As sharpness-aware minimisation and adversarial training do it."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(32)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        once = F.cross_entropy(model(x), y)
        norm.momentum = 0.0
        twice = F.cross_entropy(model(x + 0.01 * torch.randn_like(x)), y)
        norm.momentum = 0.1
        return once + twice

    assert CODE not in alarms(watched(mlp(norm), loss=loss))


def test_one_batch_again_and_again() -> None:
    """The statistics are those of this batch already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))
    x, y = torch.randn(16, WIDTH), torch.ones(16, dtype=torch.long)
    for _ in range(500):
        model(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = deepcopy(model[0].running_mean)
    with tw.watch(model, optimizer, out=None, quiet=True, checks=["model"]) as watch:
        for _ in range(16):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert before.equal(model[0].running_mean)
    assert CODE not in alarms(watch)


@pytest.mark.parametrize(("recomputes", "expected"), [(False, True), (True, False)])
def test_statistics_that_are_computed_for_the_evaluation(recomputes: bool, expected: bool) -> None:
    torch.manual_seed(0)
    model = mlp(nn.BatchNorm1d(32, momentum=0.0))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x = torch.randn(128, WIDTH)
    y = x[:, :CLASSES].argmax(1)
    with tw.watch(model, optimizer, out=None, quiet=True, checks=["model"]) as watch:
        for step in range(32):
            rows = torch.randperm(len(x))[:16]
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            if step % 16 == 15:
                if recomputes:
                    torch.optim.swa_utils.update_bn(x.split(32), model)
                model.eval()
                with torch.no_grad():
                    assert F.cross_entropy(model(x), y).item() > 0.0
                model.train()
    assert (CODE in alarms(watch)) == expected
