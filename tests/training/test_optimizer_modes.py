"""Optimizers with ``train()`` and ``eval()``: their reference loop, checkpoints, resume, and the model at the end."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from tests import ranks
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.manifest import name_of
from trainwright.checkpoint.optimizer_modes import (
    averaged_weights,
    both_weights,
    use_averaged_weights,
    use_training_weights,
)
from trainwright.checkpoint.train_state import TrainState
from trainwright.errors import TrainwrightError, UsageError

STEPS, EVERY = 12, 4


class Averaging(SGD):
    """SGD at ``y``, between the fast weights ``z`` and their mean ``x``: ScheduleFree without its library.

    As the package schedulefree does, it refuses to step in its mode for evaluation, which it begins in.
    """

    beta = 0.9

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["trains"] = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("the optimizer is not in its mode for training")
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / self.beta)
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["count"])
                p.copy_(x.lerp(z, 1 - self.beta))

    def _switch(self, trains: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if group["trains"] != trains and p in self.state:
                    p.data.lerp_(self.state[p]["z"], weight)
            group["trains"] = trains

    def train(self) -> None:
        self._switch(True, 1 - self.beta)

    def eval(self) -> None:
        self._switch(False, 1 - 1 / self.beta)


def schedulefree(name: str) -> Callable[..., Optimizer]:
    return getattr(pytest.importorskip("pytorch_optimizer"), name)  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[], Callable[..., Optimizer]]] = {
    "own": lambda: Averaging,
    "adamw": lambda: schedulefree("ScheduleFreeAdamW"),
    "sgd": lambda: schedulefree("ScheduleFreeSGD"),
    "radam": lambda: schedulefree("ScheduleFreeRAdam"),
    "splus": lambda: schedulefree("SPlus"),
}
each_maker = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)


class Objects:
    """A model with dropout, its data and its loader, the same for each call."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        x = torch.randn(40, 6)
        self.data = TensorDataset(x, (x.sum(1) > 0).long())
        self.val = TensorDataset(x[:16], (x[:16].sum(1) > 0).long())
        self.model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 2))
        self.loader = DataLoader(self.data, batch_size=8, shuffle=True)
        self.loss = nn.CrossEntropyLoss()


def reference(make: Callable[..., Optimizer]) -> tuple[nn.Module, list[float]]:
    """The loop of the documentation: ``train()`` before a step, ``eval()`` before an evaluation, here of a copy.

    The round trip of ``eval()`` and ``train()`` rounds, so a loop that evaluates the live weights depends on how often
    it evaluates.
    """
    its, losses = Objects(), list[float]()
    optimizer: Any = make(its.model.parameters(), lr=0.05)
    torch.manual_seed(4)
    optimizer.train()
    its.model.train()
    step = 0
    while step < STEPS:
        for x, target in its.loader:
            optimizer.zero_grad()
            its.loss(its.model(x), target).backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                model, averaged = copy.deepcopy((its.model, optimizer))
                averaged.eval()
                model.eval()
                with torch.no_grad():
                    x_val, target_val = its.val.tensors
                    losses.append(float(its.loss(model(x_val), target_val)))
            if step == STEPS:
                break
    optimizer.eval()
    return its.model, losses


def fitted(make: Callable[..., Optimizer], name: str = "run", **given: Any) -> tuple[nn.Module, tw.Result]:
    its = Objects()
    torch.manual_seed(4)
    settings = {"log.every": "1steps", "evaluation.every": f"{EVERY}steps", "checkpoint.every": "4steps"}
    settings |= {"checkpoint.keep": 9, "evaluation.batch": 16, "log.doctor": False} | given.pop("settings", {})
    steps = given.pop("steps", STEPS)
    optimizer = make(its.model.parameters(), lr=0.05)
    result = tw.fit(
        its.model,
        its.loader,
        its.loss,
        val=its.val,
        steps=steps,
        optimizer=optimizer,
        name=name,
        quiet=True,
        settings=settings,
        **given,
    )
    return its.model, result


def records(result: tw.Result, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (result.run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(same_bits(a, b) for a, b in pairs)


@pytest.mark.process  # each starts threads that read the machine
@pytest.mark.slow
@each_maker
def test_fit_equals_the_reference_loop_also_if_it_is_stopped_and_resumed(
    maker: Callable[[], Callable[..., Optimizer]],
) -> None:
    model, losses = reference(maker())
    straight, whole = fitted(maker(), "straight")
    assert equal(straight, model)
    assert [each["loss"] for each in records(whole, "evaluated")] == losses
    assert len(set(losses)) == len(losses)
    stop = tw.Stop("enough")
    _, stopped = fitted(maker(), "halves", observers=[lambda result, state: stop if result.step == 7 else None])
    again, ended = fitted(maker(), "halves", resume=stopped.run)
    assert (stopped.step, ended.step) == (7, STEPS)
    assert equal(again, straight)
    assert records(whole, "evaluated")[-1]["loss"] == records(ended, "evaluated")[-1]["loss"]
    part = "rest.safetensors"
    one, other = (load_file(r.run / "checkpoints" / name_of(STEPS) / part) for r in (whole, ended))
    assert one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)


@pytest.mark.process
@pytest.mark.slow
def test_a_checkpoint_has_the_averaged_weights_as_the_model() -> None:
    model, result = fitted(Averaging)
    folder = result.run / "checkpoints" / name_of(STEPS)
    saved, rest = load_file(folder / "model.safetensors"), load_file(folder / "rest.safetensors")
    assert all(same_bits(saved[name], value) for name, value in model.state_dict().items())
    training = {name: rest[f"training_weights.{name}"] for name in saved}
    assert not any(same_bits(saved[name], training[name]) for name in saved)
    its = Objects()
    losses = [each["loss"] for each in records(result, "evaluated")]
    for step, loss in zip(range(EVERY, STEPS + 1, EVERY), losses, strict=True):
        assert tw.evaluate(result.run, its.val, its.loss, model=its.model, which=step, batch=16).loss == loss
    assert tw.evaluate(result, its.val, batch=16).loss == losses[-1]


@pytest.mark.process
@pytest.mark.slow
def test_evaluations_and_saves_change_nothing() -> None:
    often, _ = fitted(Averaging, "often", settings={"evaluation.every": "1steps", "checkpoint.every": "1steps"})
    seldom, _ = fitted(Averaging, "seldom", settings={"evaluation.every": "1run", "checkpoint.every": None})
    watched, _ = fitted(Averaging, "watched", settings={"log.doctor": True, "log.examine": "all"})
    assert equal(often, seldom) and equal(watched, seldom)


def stepped(optimizer: Any, model: nn.Module, steps: int = 3) -> None:
    torch.manual_seed(5)
    use_training_weights(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


@each_maker
def test_the_training_weights_come_back_bit_for_bit(maker: Callable[[], Callable[..., Optimizer]]) -> None:
    model = Objects().model
    optimizer = maker()(model.parameters(), lr=0.05)
    with averaged_weights(optimizer):
        pass  # no update was made yet
    stepped(optimizer, model, 8)
    before = [p.detach().clone() for p in model.parameters()]
    with averaged_weights(optimizer):
        assert not all(same_bits(p.detach(), was) for p, was in zip(model.parameters(), before))
    assert all(same_bits(p.detach(), was) for p, was in zip(model.parameters(), before))
    stepped(optimizer, model, 1)  # it is in its mode for training


@each_maker
def test_a_state_is_saved_alike_in_both_modes(maker: Callable[[], Callable[..., Optimizer]], tmp_path: Path) -> None:
    model = Objects().model
    optimizer = maker()(model.parameters(), lr=0.05)
    stepped(optimizer, model)
    one, _ = tw.save_checkpoint(TrainState(model, optimizer), tmp_path / "training")
    use_averaged_weights(optimizer)
    averaged = [p.detach().clone() for p in model.parameters()]
    other, _ = tw.save_checkpoint(TrainState(model, optimizer), tmp_path / "averaged")
    assert all(same_bits(p.detach(), was) for p, was in zip(model.parameters(), averaged))
    for part in ("model", "rest"):
        first, second = (load_file(each / f"{part}.safetensors") for each in (one, other))
        assert first.keys() == second.keys()
        for key in first:
            torch.testing.assert_close(first[key], second[key], msg=key)  # eval() and train() round
    fresh = Objects().model
    again = maker()(fresh.parameters(), lr=0.05)
    tw.load_checkpoint(TrainState(fresh, again), one)
    use_training_weights(optimizer)
    stepped(again, fresh)


def test_an_optimizer_without_modes_has_no_second_weights() -> None:
    model = Objects().model
    with both_weights(SGD(model.parameters(), lr=0.1)) as weights:
        assert weights == ({}, {})


@pytest.mark.process
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model.ema": 0.9}, "contradicts the optimizer: Averaging averages"),
        ({"model.swa": {"start": "2steps"}}, "swa"),
    ],
    ids=["ema", "swa"],
)
def test_a_second_average_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(TrainwrightError, match=says):
        fitted(Averaging, settings=settings)


def test_it_cannot_be_offloaded() -> None:
    with pytest.raises(UsageError, match="averages the weights itself and cannot be offloaded"):
        tw.make_optimizer(Averaging, Objects().model, lr=0.1, offload=True)


RANKS = """
import json, sys, torch
import trainwright as tw
from torch import nn
from tests.training.test_optimizer_modes import Averaging, Objects

its = Objects()
its.model[2].p = 0.0
settings = {"evaluation.every": "4steps", "log.doctor": False, **json.loads(sys.argv[1])}
result = tw.fit(its.model, its.data, its.loss, val=its.val, batch=8, steps=12, seed=1, name=sys.argv[2], quiet=True,
                optimizer=Averaging, lr=0.05, settings=settings)
"""


@pytest.mark.process
@pytest.mark.slow
def test_ranks_save_the_weights_of_one_process(tmp_path: Path) -> None:
    cases: list[tuple[str, int, dict[str, int]]] = [("one", 1, {}), ("two", 2, {}), ("shard", 2, {"parallel.shard": 2})]
    saved = []
    for name, count, settings in cases:
        ranks.finish(RANKS, count, json.dumps(settings), name, cwd=tmp_path)
        folder = tmp_path / "runs" / name / "checkpoints" / name_of(STEPS)
        saved.append(ranks.tensors_in(folder, "model", "rest"))
    for other in saved[1:]:
        for key in [key for key in saved[0] if not key.startswith("rng")]:
            torch.testing.assert_close(other[key], saved[0][key], msg=key)
