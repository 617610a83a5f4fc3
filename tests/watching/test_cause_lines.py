"""Findings give the line that causes the fault: where a tensor was made or cut, an object made, or a state set."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import trainwright as tw

Watch = Callable[..., Any]


def net(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def divergence_of(student: Tensor, teacher: Tensor) -> Tensor:
    wanted = F.softmax(teacher / 2, dim=1)
    given = F.softmax(student / 2, dim=1)  # cause
    return F.kl_div(given, wanted, reduction="batchmean")


def probabilities_in_kl_div(watch: Watch) -> None:
    model, teacher = net(), net().requires_grad_(False)
    optimizer = adam(model)
    with watch(model, optimizer):
        for _ in range(6):
            x = torch.randn(32, 8)
            update(optimizer, divergence_of(model(x), teacher(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.body(x)
        return scores.softmax(1)  # cause


def softmax_in_the_model(watch: Watch) -> None:
    model = Classifier()
    optimizer = adam(model)
    with watch(model, optimizer):
        for _ in range(6):
            x = torch.randn(32, 8)
            update(optimizer, F.cross_entropy(model(x), x[:, :3].argmax(1)))


class Modules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.out = nn.Sequential(nn.Linear(3, 3), nn.Softmax(1))  # cause

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.body(x).relu())
        return scores


def softmax_module(watch: Watch) -> None:
    model = Modules()
    optimizer = adam(model)
    with watch(model, optimizer):
        for _ in range(6):
            x = torch.randn(32, 8)
            update(optimizer, F.cross_entropy(model(x), x[:, :3].argmax(1)))


def penalty_without_graph(watch: Watch) -> None:
    model = net(1)
    optimizer = adam(model)
    with watch(model, optimizer):
        for _ in range(6):
            x = torch.randn(32, 8, requires_grad=True)
            score = model(x)
            (slope,) = torch.autograd.grad(score.sum(), x, retain_graph=True)  # cause
            penalty = (slope.norm(dim=1) - 1).square().mean()
            update(optimizer, F.mse_loss(score, torch.ones_like(score)) + 10 * penalty)


def hard_loss(watch: Watch) -> None:
    model = net(1)
    optimizer = adam(model)
    with watch(model, optimizer):
        for _ in range(24):
            score = model(torch.randn(32, 8)).sigmoid()
            hard = (score > 0.5).float().requires_grad_(True)  # cause
            update(optimizer, (hard - 1).square().mean())


def preview_with_a_seed(watch: Watch) -> None:
    torch.manual_seed(1)
    model = net()
    optimizer = adam(model)
    with watch(model, optimizer):
        for step in range(40):
            if step % 4 == 0:
                generator = torch.manual_seed(0)  # cause
                model(torch.randn(2, 8, generator=generator))
            x = torch.randn(32, 8)
            update(optimizer, F.cross_entropy(model(x + torch.randn_like(x)), x[:, :3].argmax(1)))


def load_of_a_target_that_is_the_model(watch: Watch) -> None:
    online = target = net()
    optimizer = adam(online)
    with watch(online, optimizer):
        for step in range(24):
            x = torch.randn(32, 8)
            with torch.no_grad():
                wanted = 0.9 * target(x + 1).max(1).values
            update(optimizer, F.mse_loss(online(x).max(1).values, wanted))
            if step % 4 == 3:
                target.load_state_dict(online.state_dict())  # cause


def one_weight_for_each_class(watch: Watch) -> None:
    x = torch.randn(320, 8)
    y = x[:, :3].argmax(1)
    weights = 1 / torch.bincount(y)
    sampler = WeightedRandomSampler(weights.tolist(), len(x))  # cause
    loader = DataLoader(TensorDataset(x, y), 32, sampler=sampler)
    model = net()
    optimizer = adam(model)
    with watch(model, optimizer, loader=loader):
        for _ in range(3):
            for rows, labels in loader:
                update(optimizer, F.cross_entropy(model(rows), labels))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "program"),
    [
        ("loss.nll_without_log_softmax", probabilities_in_kl_div),
        ("loss.softmax_before_cross_entropy", softmax_in_the_model),
        ("loss.softmax_before_cross_entropy", softmax_module),
        ("loss.term_without_gradient", penalty_without_graph),
        ("optim.weights_never_move", hard_loss),
        ("loop.random_state_repeats", preview_with_a_seed),
        ("checkpoint.loaded_from_itself", load_of_a_target_that_is_the_model),
        ("data.samples_never_drawn", one_weight_for_each_class),
    ],
)
def test_the_line_of_a_finding_is_its_cause(code: str, program: Callable[[Watch], None]) -> None:
    torch.manual_seed(0)
    watches: list[Any] = []

    def watch(*args: Any, **options: Any) -> Any:
        watches.append(tw.watch(*args, out=None, quiet=True, **{"examine": "listen", **options}))
        return watches[-1]

    program(watch)
    found = next((each for each in watches[0].findings() if each.code == code), None)
    assert watches[0].session.failures == []
    assert found is not None and found.where.source is not None
    assert "# cause" in linecache.getline(__file__, int(found.where.source.partition(":")[2]))


@pytest.mark.slow
def test_the_part_without_a_gradient_is_named() -> None:
    """A generator whose output is detached in its own step, where the discriminator gets the gradients."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": net(8), "discriminator": net(1)})
    optimizers = [adam(model["generator"]), adam(model["discriminator"])]
    with tw.watch(model, optimizers, out=None, quiet=True, examine="listen") as watch:
        for _ in range(12):
            fake = model["generator"](torch.randn(16, 8))
            update(optimizers[1], model["discriminator"](fake.detach()).mean())
            update(optimizers[0], -model["discriminator"](fake.detach()).mean())
    found = {each.code: each.where.module for each in watch.findings()}
    assert found.get("loss.detached_from_model") == "generator"


def test_a_state_that_is_loaded_at_once_is_not_a_kept_one() -> None:
    model = net()
    average, optimizer = copy.deepcopy(model), adam(model)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(8):
            update(optimizer, model(torch.randn(32, 8)).square().mean())
            model.load_state_dict(model.state_dict())
            average.load_state_dict(model.state_dict())
    assert "checkpoint.kept_state_changes" not in {each.code for each in watch.findings()}
