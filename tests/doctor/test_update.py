"""The laws of the update hold on healthy loops of every optimizer, and break, with the right place, where due."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import trainwright as tw
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.runlog.records import Found

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

Making = Callable[[Iterable[Tensor]], Optimizer]
Act = Callable[[int, nn.Sequential, Optimizer], object]


def adamw(parameters: Iterable[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def nothing(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    """A healthy loop does no more."""


def watched(
    make: Making = adamw,
    *,
    before: Act = nothing,
    after: Act = nothing,
    steps: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A small loop; ``before`` comes between backward and step, ``after`` behind it."""
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    y = (x @ torch.randn(6, 3)).argmax(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3)).to(dtype)
    optimizer = make(model.parameters())
    with tw.watch(model, optimizer, out=None, quiet=True, laws="update") as watch:
        for step in range(steps):
            rows = torch.randperm(64)[:16]
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows].to(dtype)).float(), y[rows]).backward()
            before(step, model, optimizer)
            optimizer.step()
            after(step, model, optimizer)
    assert watch.session.failures == []
    return watch


def states(watch: Any) -> dict[str, str]:
    laws = diagnose(Case(watch.records, finished=True)).laws
    return {each.name.removeprefix("update."): each.state for each in laws if each.name.startswith("update.")}


def found(watch: Any) -> dict[str, Found]:
    return {each.code: each for each in watch.findings() if each.code != "loop.unseen"}


HEALTHY: tuple[Making, ...] = (
    adamw,
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, weight_decay=0.1),
    lambda p: torch.optim.RMSprop(p, 1e-2, centered=True, momentum=0.5),
    lambda p: torch.optim.Adagrad(p, 0.1),
    lambda p: torch.optim.NAdam(p, 1e-2),
)


@pytest.mark.parametrize(
    "make", HEALTHY, ids=["adamw", "nesterov", "dampened", "amsgrad", "rmsprop", "adagrad", "nadam"]
)
def test_every_law_holds_on_a_healthy_loop(make: Making) -> None:
    watch = watched(make)
    assert set(states(watch).values()) == {"held"}
    assert found(watch) == {}


def test_the_laws_hold_in_16_bits() -> None:
    assert set(states(watched(dtype=torch.bfloat16)).values()) == {"held"}


def negate(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.neg_()


def drop_first(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    for p in model[0].parameters():
        assert p.grad is not None
        p.grad.data.zero_()


def halve(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data.mul_(0.5)


def negate_first(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    """One player goes up: the other has the same backward pass."""
    for p in model[0].parameters():
        assert p.grad is not None
        p.grad.neg_()


@each_row(
    ("act", "severity", "module", "words"),
    [
        (negate, "warning", None, "-1 times"),
        (negate_first, "info", "0", "-1 times"),
        (drop_first, "info", "0", "gone"),
        (halve, "info", None, "0.5 times"),
    ],
)
def test_gradients_that_are_changed_by_hand(act: Act, severity: str, module: str | None, words: str) -> None:
    broken = found(watched(before=act, steps=8))["law.update.gradients_are_those_made"]
    assert (broken.severity, broken.where.module, broken.since_step) == (severity, module, 1)
    assert words in broken.symptom


class Earlier:
    """Puts weights of long ago back, as an evaluation does that forgets to restore what it has put in."""

    def __init__(self, *at: int) -> None:
        self.at = at
        self.kept: dict[str, Tensor] = {}

    def __call__(self, step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
        if step == 0:
            self.kept = {name: value.clone() for name, value in model.state_dict().items()}
        if step in self.at:
            model.load_state_dict(self.kept)
            evaluate(model)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.zeros(2, 6))


def clamp(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def draw_first(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    """A part begins anew, and the moments stay."""
    if step in (4, 6):
        model[0].reset_parameters()


def draw_all(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    if step == 9:
        for number in (0, 3):
            model[number].reset_parameters()


def scale_last(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    if step in (4, 6):
        with torch.no_grad():
            model[3].bias.mul_(-30).add_(2)


@each_row(
    ("act", "severity", "since", "module"),
    [
        (Earlier(6, 9), "warning", 8, None),
        (clamp, "info", 2, None),
        (draw_first, "info", 6, "0"),
        (draw_all, "info", 11, None),
        (scale_last, "info", 6, "3"),
    ],
)
def test_weights_that_somebody_else_writes_to(act: Act, severity: str, since: int, module: str | None) -> None:
    watch = watched(lambda p: torch.optim.AdamW(p, 0.1), after=act, steps=12)
    broken = found(watch)["law.update.nothing_else_writes"]
    assert (broken.severity, broken.since_step) == (severity, since)
    assert broken.where.module == module


def shrink(factor: float, step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)


@pytest.mark.parametrize(("factor", "severity"), [(0.9, "warning"), (0.997, "info")])
def test_a_factor_of_all_weights_is_judged_by_what_it_costs(factor: float, severity: str) -> None:
    broken = found(watched(after=partial(shrink, factor), steps=16))["law.update.nothing_else_writes"]
    assert (broken.severity, broken.since_step) == (severity, 2)
    told = f"multiplied by {factor}" in broken.symptom
    assert told == (severity == "warning")


class Back:
    """Goes back to what it has kept, weights and the state of the optimizer."""

    def __init__(self, kept_at: int, *at: int, with_state: bool = True) -> None:
        self.kept_at, self.at, self.with_state = kept_at, at, with_state
        self.kept: tuple[Any, Any] = ({}, {})

    def __call__(self, step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
        if step == self.kept_at:
            self.kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step in self.at:
            model.load_state_dict(self.kept[0])
            if self.with_state:
                optimizer.load_state_dict(copy.deepcopy(self.kept[1]))


def begin_again(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    """New weights in the last layer, and moments that begin with them (Nikishin et al., 2022)."""
    if step in (6, 9):
        with torch.no_grad():
            model[3].bias.normal_(std=3.0)
        del optimizer.state[model[3].bias]


def test_a_loop_that_goes_back_changes_the_state_too() -> None:
    for act in (Back(3, 6, 9), begin_again):
        broken = found(watched(lambda p: torch.optim.AdamW(p, 0.1), after=act, steps=12))
        seen = broken["law.update.nothing_else_writes"]
        assert (seen.severity, "began again" in seen.symptom) == ("info", True)


@each_row(("kept_before", "severity"), [(True, "info"), (False, "warning")])
def test_without_a_state_only_a_rewind_to_the_begin_is_told(kept_before: bool, severity: str) -> None:
    back = Back(0, 9, with_state=False)

    def before(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
        if step == 0 and kept_before:
            back(step, model, optimizer)

    def after(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
        if step > 0 or not kept_before:
            back(step, model, optimizer)
            evaluate(model)

    watch = watched(lambda p: torch.optim.SGD(p, 1.0), before=before, after=after, steps=12)
    assert found(watch)["law.update.nothing_else_writes"].severity == severity


def test_weights_that_are_put_back_were_not_written_to() -> None:
    def evaluated(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: value * 0.5 for name, value in kept.items()})
        evaluate(model)
        model.load_state_dict(kept)

    assert states(watched(after=evaluated))["nothing_else_writes"] == "held"


def zeroed(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    nn.init.zeros_(model[3].bias)


def pinned(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    model[3].bias.data.clamp_(0.3, 0.3)


def put_back(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    model[3].bias.data.copy_(torch.full((3,), 0.5))


def within_bounds(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    model[3].bias.data.clamp_(-0.2, 0.2)


@pytest.mark.parametrize(
    ("act", "severity"),
    [(zeroed, "warning"), (pinned, "warning"), (put_back, "warning"), (within_bounds, "info")],
)
def test_updates_that_are_undone(act: Act, severity: str) -> None:
    broken = found(watched(after=act, steps=12))["law.update.nothing_else_writes"]
    assert broken.severity == severity
    assert (broken.where.module == "3" and "is undone" in broken.symptom) == (severity == "warning")


def kept_at_its_bound(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    """As a multiplier of a constraint that holds: it begins at the bound, and is pushed back to it."""
    model[3].bias.data.clamp_(0.0, 0.0)


def test_what_begins_at_a_bound_may_stay_there() -> None:
    def make(parameters: Iterable[Tensor]) -> Optimizer:
        made = list(parameters)
        nn.init.zeros_(made[-1])
        return adamw(made)

    broken = found(watched(make, after=kept_at_its_bound, steps=12))["law.update.nothing_else_writes"]
    assert (broken.severity, "is undone" in broken.symptom) == ("info", False)


def hooked(parameters: Iterable[Tensor]) -> Optimizer:
    """A function of the user's shrinks a weight after each update."""
    optimizer = adamw(parameters)

    def shrink(optimizer: Optimizer, args: object, kwargs: object) -> None:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].mul_(0.99)

    optimizer.register_step_post_hook(shrink)
    return optimizer


def test_an_update_that_is_not_what_its_rule_says() -> None:
    broken = found(watched(hooked))["law.update.follows_its_rule"]
    assert (broken.severity, broken.where.module, broken.since_step) == ("info", "0", 1)


@each_row(
    ("scale", "state"),
    [(1.0, "held"), (1.001, "held"), (1.1, "held"), (1.5, "broken"), (-1.0, "broken"), (2.0, "broken")],
)
def test_a_kernel_that_computes_another_update(scale: float, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.1 is within 16 roundings of a bfloat16 weight."""
    module = importlib.import_module("torch.optim.sgd")
    kernel = module._single_tensor_sgd

    def wrong(*args: Any, lr: float, **kwargs: Any) -> None:
        is_reference = args[0][0].dtype == torch.float64
        kernel(*args, lr=lr if is_reference else lr * scale, **kwargs)

    monkeypatch.setattr(module, "_single_tensor_sgd", wrong)
    watch = watched(lambda p: torch.optim.SGD(p, 0.1), dtype=torch.bfloat16)
    assert states(watch)["follows_its_rule"] == state


@each_row(
    ("make", "dtype"),
    [
        (lambda p: torch.optim.SGD(p, 1e-5), torch.bfloat16),
        (lambda p: torch.optim.AdamW(p, 1e-6), torch.bfloat16),
        (lambda p: torch.optim.SGD(p, 1e-8), torch.float32),
    ],
)
def test_updates_that_the_weights_do_not_take_on(make: Making, dtype: torch.dtype) -> None:
    assert states(watched(make, dtype=dtype))["is_kept"] == "broken"


class Uphill(torch.optim.Optimizer):
    """A rule of the user's own that adds where it should subtract."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=group["lr"])


def backwards(parameters: Iterable[Tensor]) -> Optimizer:
    """A schedule that has gone below 0."""
    optimizer = torch.optim.SGD(parameters, 0.1)
    optimizer.param_groups[0]["lr"] = -0.1
    return optimizer


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, maximize=True), Uphill, backwards])
def test_updates_that_go_uphill(make: Making) -> None:
    assert found(watched(make))["law.update.descends"].severity == "critical"


def test_a_rule_that_climbs_may_be_meant_where_nothing_tells_a_loss() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 6), torch.randint(3, (64,))
    model = nn.Linear(6, 3)
    optimizer = Uphill(model.parameters())
    with tw.watch(model, optimizer, out=None, quiet=True, laws="update") as watch:
        for _ in range(8):
            optimizer.zero_grad()
            model(x).softmax(1).gather(1, y[:, None]).mean().backward()
            optimizer.step()
    assert found(watch)["law.update.descends"].severity == "info"


def test_a_step_that_is_made_twice_has_its_name() -> None:
    watch = watched(after=lambda step, model, optimizer: optimizer.step())
    assert states(watch)["once_for_each"] == "broken"
    assert "law.update.once_for_each" not in found(watch)


@pytest.mark.parametrize(("left_out", "is_told"), [("0.bias", False), ("2.bias", True)])
def test_a_bias_before_a_norm_gets_no_gradient_but_rounding(left_out: str, is_told: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3))
    optimizer = torch.optim.Adam([p for name, p in model.named_parameters() if name != left_out], 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for _ in range(6):
            model.zero_grad()
            (model(x) - x[:, :3]).square().mean().backward()
            optimizer.step()
    assert ("opt.params_missing" in [each.code for each in watch.findings()]) is is_told


def test_a_momentum_that_cancels_its_gradient_rounds_as_they_do() -> None:
    """The update is a small part of its two terms, in which float32 rounds."""

    def cancelled(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
        bias = model[3].bias
        bias.data.zero_()  # no rounding of a weight comes on top
        if state := optimizer.state.get(bias):
            bias.grad = -9 * state["exp_avg"] * (1 - 1e-3)

    watch = watched(before=cancelled)
    assert states(watch)["follows_its_rule"] == "held"


def test_optimizers_that_a_loop_makes_in_every_step_are_let_go() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    outer, made = torch.optim.SGD(model.parameters(), 0.1), []
    with tw.watch(model, outer, out=None, quiet=True):
        for _ in range(40):
            x = torch.randn(16, 4)
            y = x[:, :3].argmax(1)
            fast = [p.detach().clone().requires_grad_() for p in model.parameters()]
            inner = torch.optim.SGD(fast, 0.01)
            made.append(weakref.ref(inner))
            F.cross_entropy(F.linear(x, *fast), y).backward()
            inner.step()
            outer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            outer.step()
        gc.collect()
        assert sum(each() is not None for each in made) <= 2
