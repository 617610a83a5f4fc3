"""The dry run leaves nothing behind."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.engine.plain import cut
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.isolation import NotIsolated
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.dry_run import MAX_ROUNDS, Mode, dry_run, time_evaluation
from trainwright.engine.precision import FP32, Precision

REMEMBERED: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()
"""Objects behind weak references are not restored."""


class Remembering(nn.Module):
    """Applies ``function`` and remembers its results weakly."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.name = name
        REMEMBERED[self] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        result: Tensor = torch.softmax(hidden, -1) if self.name == "softmax" else getattr(torch, self.name)(hidden)
        REMEMBERED[self].append(weakref.ref(result))
        return result


@pytest.mark.parametrize("name", ["tanh", "relu", "exp", "sigmoid", "softmax"])
def test_gives_back_the_activations_of_operators_that_save_their_result(name: str) -> None:
    model = Remembering(name)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = cut((torch.randn(4, 8), torch.randint(3, (4,))), 4)
    seen = dry_run(state, batch, nn.functional.cross_entropy, modes=[Mode(FP32, 1)], budget_s=0)
    gc.collect()
    results = REMEMBERED[model]
    assert seen.activation_bytes > 0 and len(results) >= 4
    assert [result() for result in results] == [None] * len(results)


def test_the_update_is_timed_and_leaves_no_trace() -> None:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    batch = StepBatch((MicroBatch(torch.randn(1, 512), np.arange(1)),))
    seen = dry_run(TrainState(model, optimizer), batch, lambda model, x: model(x).mean(), modes=[Mode(FP32, 1)])
    assert 0 < seen.update_s < 1
    assert torch.equal(model.weight, before) and model.weight.grad is None and not optimizer.state


@pytest.mark.slow
def test_first_calls_that_are_slow_do_not_count() -> None:
    """As on a busy machine, where two calls of half a second each came before steps of a tenth of that."""

    class Warming(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            time.sleep(0.51 if self.calls <= 3 else 0.0)  # one of them is not timed
            return super().forward(x)

    model = Warming(8, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = StepBatch((MicroBatch(torch.randn(1, 8), np.arange(1)),))
    seen = dry_run(state, batch, lambda model, x: model(x).mean(), modes=[Mode(FP32, 1)])
    assert seen.seconds["fp32", 1] < 0.25


def test_an_optimizer_that_cannot_be_copied_is_not_timed() -> None:
    class Alone(torch.optim.SGD):
        def __deepcopy__(self, memo: object) -> Alone:
            raise TypeError("there is one of these")

    model = nn.Linear(4, 4)
    batch = StepBatch((MicroBatch(torch.randn(1, 4), np.arange(1)),))
    state = TrainState(model, Alone(model.parameters(), lr=1.0))
    assert dry_run(state, batch, lambda model, x: model(x).mean(), modes=[Mode(FP32, 1)]).update_s == 0.0


def test_waiting_is_no_work_of_the_thread() -> None:
    """A busy machine lets a step wait: its processor time stays."""

    class Waiting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.05)
            return super().forward(x)

    model = Waiting(8, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = StepBatch((MicroBatch(torch.randn(1, 8), np.arange(1)),))
    seen = dry_run(state, batch, lambda model, x: model(x).mean(), modes=[Mode(FP32, 1)], budget_s=0.0)
    assert seen.seconds["fp32", 1] >= 0.05
    assert 0 < seen.thread_s["fp32", 1] < 0.025


class Changing(nn.Module):
    """Keeps state in all kinds of places, and prints."""

    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))
        self.calls, self.log = 0, {"a": ([0], np.zeros(2))}
        self.generator, self.means = torch.Generator().manual_seed(1), [torch.zeros(3)]
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        Changing.total += 1
        self.log["a"][0].append(self.calls)
        self.log["a"][1][:] += 1
        hidden: Tensor = self.inner(x) + torch.rand(3, generator=self.generator) + np.random.rand()
        self.means[0].data.add_(hidden.detach().mean(0))
        self.count = self.count + 1  # type: ignore[has-type]
        print("forward", self.calls)
        return hidden

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def everything(self) -> str:
        own = (self.calls, self.total, self.log, self.generator.get_state().tolist(), self.means)
        return repr((own, self.state_dict(), np.random.get_state(), torch.get_rng_state().tolist(), vars(self).keys()))


def test_a_model_is_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    model = Changing()
    torch.manual_seed(0)
    batch = cut((torch.randn(4, 8), torch.randint(3, (4,))), 4)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    hooked: list[int] = []
    state.optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    before = model.everything()
    dry_run(state, batch, nn.functional.cross_entropy, modes=[Mode(FP32, 1)])
    time_evaluation(state, batch.micro, nn.functional.cross_entropy, Mode(FP32, 1))
    assert model.everything() == before
    assert hooked == [] and not state.optimizer.state and capsys.readouterr().out == ""


class Writing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with Path("written.txt").open("w"):
            return super().forward(x)


class Iterating(nn.Linear):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.numbers = iter(range(10))


@pytest.mark.parametrize(("make", "why"), [(Writing, "opens a file to write"), (Iterating, "numbers is an iterator")])
def test_a_model_that_would_keep_a_trace_is_not_tried(make: type[nn.Linear], why: str) -> None:
    model = make(8, 3)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = cut((torch.randn(4, 8), torch.randint(3, (4,))), 4)
    with pytest.raises(NotIsolated, match=why):
        dry_run(state, batch, nn.functional.cross_entropy, modes=[Mode(FP32, 1)])
    with pytest.raises(NotIsolated, match=why):
        time_evaluation(state, batch.micro, nn.functional.cross_entropy, Mode(FP32, 1))
    assert not Path("written.txt").exists()


def test_a_machine_that_is_busy_most_of_the_time_is_foretold_as_such() -> None:
    calls: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()

    def wait(module: nn.Module, *_: object) -> None:
        calls[module].append(1)
        if len(calls[module]) % 4:
            time.sleep(0.02)

    model = nn.Linear(8, 1)
    calls[model] = []
    model.register_forward_hook(wait)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = StepBatch((MicroBatch(torch.randn(1, 8), np.arange(1)),))
    seen = dry_run(state, batch, lambda model, x: model(x).mean(), modes=[Mode(FP32, 1)], budget_s=10.0)
    assert seen.seconds["fp32", 1] >= 0.02


def test_few_calls_are_enough() -> None:
    calls: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()
    model = nn.Linear(8, 3)
    calls[model] = []
    model.register_forward_hook(lambda module, args, out: calls[module].append(1))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = cut((torch.randn(4, 8), torch.randint(3, (4,))), 4)
    dry_run(state, batch, nn.functional.cross_entropy, modes=[Mode(FP32, 1)], budget_s=10.0)
    assert len(calls[model]) == 1 + MAX_ROUNDS


@pytest.mark.parametrize(("bf16_s", "rounds"), [(0.003, MAX_ROUNDS), (0.012, 4)], ids=["close", "apart"])
def test_precisions_that_are_close_get_more_rounds(bf16_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.engine.dry_run.LONG_DRY_RUN_S", 1e9)  # on a busy machine, too
    calls: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()

    def work(module: nn.Module, *_: object) -> None:
        calls[module].append(1)
        end_s = time.thread_time() + (bf16_s if torch.is_autocast_enabled("cpu") else 0.003)
        while time.thread_time() < end_s:
            pass

    model = nn.Linear(8, 1)
    calls[model] = []
    model.register_forward_hook(work)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = StepBatch((MicroBatch(torch.randn(1, 8), np.arange(1)),))
    modes = [Mode(FP32, 1), Mode(Precision("bf16", "cpu"), 1)]
    dry_run(state, batch, lambda model, x: model(x).mean(), modes=modes, budget_s=0.0)
    assert len(calls[model]) == 1 + rounds * len(modes) * 2
