"""Stochastic weight averaging against the loop of torch's documentation, and across a stop and a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainwright as tw
from tests import ranks
from trainwright.checkpoint.average import Swa
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.manifest import name_of
from trainwright.checkpoint.weights import plain_state_dict, read_weights
from trainwright.engine.step import set_lr
from trainwright.errors import CheckpointError, TrainwrightError
from trainwright.optim.schedule import SwaSchedule
from trainwright.optim.stepped_schedule import unchanged
from trainwright.plan.make import SwaPlan

pytestmark = [pytest.mark.process, pytest.mark.slow]  # each starts threads that read the machine

EPOCHS, PER_EPOCH, SWA_START = 9, 5, 3
SWA = {"start": f"{SWA_START + 2}ep", "every": "1ep", "lr": 0.03, "anneal": "3ep"}
"""The loop of torch averages first after the epoch of index swa_start + 1."""


class Objects:
    """A model with BatchNorm and dropout, its data, optimizer and schedule, the same for each call."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        x = torch.randn(36, 6, dtype=dtype)
        layers = [nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 12)]
        self.model = nn.Sequential(*layers, nn.BatchNorm1d(12, momentum=0.3), nn.Linear(12, 2)).to(dtype)
        self.loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
        self.optimizer = SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.schedule: LRScheduler = CosineAnnealingLR(self.optimizer, T_max=EPOCHS)
        self.loss = nn.CrossEntropyLoss()


def tutorial(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module, list[float]]:
    """The example in the documentation of ``AveragedModel``. Returns both models, and the rate of each step."""
    its, lrs = Objects(dtype), list[float]()
    swa_model = AveragedModel(its.model)
    swa_scheduler = SWALR(its.optimizer, swa_lr=0.03, anneal_epochs=3)
    torch.manual_seed(4)
    for i in range(EPOCHS):
        for x, target in its.loader:
            its.optimizer.zero_grad()
            its.loss(its.model(x), target).backward()
            its.optimizer.step()
            lrs.append(its.optimizer.param_groups[0]["lr"])
        if i > SWA_START:
            swa_model.update_parameters(its.model)
            swa_scheduler.step()
        else:
            its.schedule.step()
    update_bn(its.loader, swa_model)
    return its.model, swa_model.module, lrs


def fitted(
    dtype: torch.dtype = torch.float32,
    *,
    swa: dict[str, object] = SWA,
    settings: dict[str, object] | None = None,
    **more: Any,
) -> tuple[tw.Result, list[float]]:
    its, lrs = Objects(dtype), list[float]()
    options: dict[str, Any] = {"optimizer": its.optimizer, "schedule": its.schedule, "quiet": True}
    options["settings"] = {"model.swa": swa, "schedule.every": "1ep", "checkpoint.keep": 9, **(settings or {})}
    observers = [lambda result, state: lrs.append(result.lr), *more.pop("observers", ())]
    options |= {"epochs": EPOCHS, **more}
    torch.manual_seed(4)
    return tw.fit(its.model, its.loader, its.loss, observers=observers, **options), lrs


def averaged(result: tw.Result) -> dict[str, Tensor]:
    assert result.state is not None
    with result.state.ema.swapped():
        return {name: each.clone() for name, each in plain_state_dict(result.state.model).items()}


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not same_bits(one[name], other[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_is_the_loop_of_torch_bit_for_bit(dtype: torch.dtype) -> None:
    model, swa_model, lrs = tutorial(dtype)
    result, its_lrs = fitted(dtype, settings={"checkpoint.every": "1ep"})  # also after the last step
    assert result.state is not None
    assert its_lrs == lrs
    require_same(plain_state_dict(result.state.model), model.state_dict())
    require_same(averaged(result), dict(swa_model.state_dict()))
    checkpoint = result.run / "checkpoints" / name_of(EPOCHS * PER_EPOCH)
    require_same(read_weights(checkpoint, average=True), dict(swa_model.state_dict()))
    require_same(read_weights(checkpoint), model.state_dict())


QUICK: dict[str, object] = {"log.doctor": False, "log.layers": False}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[tw.Result, list[float]]:
    """The run that nothing disturbs."""
    return fitted(settings={**QUICK, "folder": str(tmp_path_factory.mktemp("straight"))})


def stops_at(step: int, how: Callable[[], object]) -> Callable[[tw.StepResult, tw.TrainState], None]:
    return lambda result, state: None if result.step != step else (how(), None)[1]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# before the first average, with it, while the learning rate is annealed
@pytest.mark.parametrize("at", [24, 25, 33])
def test_a_run_that_is_stopped_and_resumed_has_the_same_bits(straight: tuple[tw.Result, list[float]], at: int) -> None:
    whole, lrs = straight
    stopped, before = fitted(settings=QUICK, observers=[stops_at(at, interrupt)], on_interrupt="return")
    assert stopped.step == at and len(before) == at
    resumed, after = fitted(settings=QUICK, resume=stopped.run)
    assert whole.state is not None and resumed.state is not None
    assert before + after == lrs
    require_same(plain_state_dict(resumed.state.model), plain_state_dict(whole.state.model))
    require_same(averaged(resumed), averaged(whole))
    files = [run / "checkpoints" / name_of(EPOCHS * PER_EPOCH) for run in (whole.run, resumed.run)]
    for part in ("model.safetensors", "rest.safetensors"):
        assert (files[0] / part).read_bytes() == (files[1] / part).read_bytes(), part


def test_a_run_that_is_killed_and_resumed_has_the_same_bits(straight: tuple[tw.Result, list[float]]) -> None:
    settings = {**QUICK, "checkpoint.every": "4steps", "checkpoint.asynchronous": False}
    if (child := os.fork()) == 0:
        fitted(settings=settings, observers=[stops_at(39, lambda: os.kill(os.getpid(), signal.SIGKILL))])
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    resumed, after = fitted(resume="runs/run", settings=settings)
    assert after == straight[1][36:]
    require_same(averaged(resumed), averaged(straight[0]))


def test_a_longer_run_goes_on_with_its_average(straight: tuple[tw.Result, list[float]]) -> None:
    """The statistics that were measured at the end of the first part leave no trace in the second."""
    short, _ = fitted(epochs=7, settings=QUICK)
    longer, _ = fitted(resume=short.run, settings=QUICK)
    require_same(averaged(longer), averaged(straight[0]))


def test_the_first_average_stays_where_it_was_in_a_longer_run() -> None:
    swa = {**SWA, "start": "0.5run"}
    short, _ = fitted(swa=swa, epochs=4, settings=QUICK)
    longer, _ = fitted(swa=swa, settings=QUICK, resume=short.run)
    assert short.state is not None and longer.state is not None
    assert isinstance(longer.state.ema, Swa)
    assert (longer.state.ema.start, longer.state.ema.num_updates) == (10, 8)


def test_the_average_is_evaluated_once_its_statistics_are_measured() -> None:
    its = Objects()
    result, _ = fitted(val=its.loader, settings={"evaluation.every": "1ep", **QUICK})
    seen = [line for line in (result.run / "log.jsonl").read_text().splitlines() if "swa_loss" in line]
    assert len(seen) == 1
    assert result.state is not None
    with result.state.ema.swapped():
        mine = tw.evaluate(result, its.loader)
    assert mine.loss == pytest.approx(result.metrics["swa_loss"])
    assert mine.loss != pytest.approx(result.val_loss)


def test_early_stopping_measures_the_statistics_too() -> None:
    def stop(result: tw.StepResult, state: tw.TrainState) -> tw.Stop | None:
        return tw.Stop("enough") if result.step == 30 else None

    result, _ = fitted(settings=QUICK, observers=[stop])
    assert result.state is not None and result.state.ema.is_complete
    average = read_weights(result.run / "checkpoints" / name_of(30), average=True)
    assert int(average["1.num_batches_tracked"]) == PER_EPOCH


def test_a_checkpoint_from_before_the_first_average_has_none() -> None:
    result, _ = fitted(settings=QUICK, epochs=5, swa={"start": "1run"})
    assert read_weights(result.run / "checkpoints" / name_of(25), average=True)
    earlier, _ = fitted(
        settings={**QUICK, "name": "earlier"}, observers=[stops_at(20, interrupt)], on_interrupt="return"
    )
    with pytest.raises(CheckpointError, match="no average of the weights yet"):
        read_weights(earlier.run / "checkpoints" / name_of(20), average=True)


def test_frozen_statistics_stay() -> None:
    its = Objects()
    its.model[1].eval()
    before = its.model[1].running_mean.clone()
    settings = {**QUICK, "model.swa": {"start": "5steps", "every": "5steps", "norm_batches": 2}}
    result = tw.fit(its.model, its.loader, its.loss, optimizer=its.optimizer, epochs=2, quiet=True, settings=settings)
    average = averaged(result)
    assert same_bits(average["1.running_mean"], before)
    assert int(average["5.num_batches_tracked"]) == 2
    assert not its.model[1].training and its.model[5].training


def test_groups_keep_their_ratio() -> None:
    its = Objects()
    groups = [{"params": its.model[0].parameters()}, {"params": its.model[6].parameters(), "lr": 0.05}]
    optimizer = SGD(groups, lr=0.2)
    settings = {**QUICK, "model.swa": {"start": "5steps", "every": "1steps", "lr": 0.1, "anneal": "2steps"}}
    tw.fit(its.model, its.loader, its.loss, optimizer=optimizer, epochs=2, quiet=True, settings=settings)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.025]


def step_of_ones_own(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
    raise AssertionError("no step is taken")


class Counting(nn.Module):
    """Counts its forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("count").add_(1)
        return x


def test_other_buffers_stay() -> None:
    its, counting = Objects(), Counting()
    model = nn.Sequential(counting, its.model)
    settings = {**QUICK, "model.swa": {"start": "5steps", "every": "5steps"}}
    tw.fit(model, its.loader, its.loss, optimizer=its.optimizer, epochs=2, quiet=True, settings=settings)
    assert counting.count.item() == 2 * PER_EPOCH


def test_a_replayed_step_has_the_rate_that_it_had() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.2)
    schedule = SwaSchedule(unchanged, optimizer, SwaPlan(start=3, every=2, anneal=2), 0.1, "linear")
    rates = []
    for step in (0, 1, 2, 3, 4, 5, 6, 3, 2, 5):
        set_lr(optimizer, schedule(step, 0.0))
        rates.append(round(optimizer.param_groups[0]["lr"], 9))
    assert rates == [0.2, 0.2, 0.2, 0.15, 0.15, 0.1, 0.1, 0.15, 0.2, 0.1]


class Stream(IterableDataset[tuple[Tensor, ...]]):
    """Data without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(Objects().loader.dataset)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"until": "5s"}, "model.swa.start.* must be a number of steps"),
        ({"until": "2ep", "settings": {"model.swa": {"start": "11steps"}}}, "after the end of the run at step 10"),
        ({"settings": {"model.swa": {}, "model.ema": 0.9}}, "contradicts ema"),
        ({"advance": step_of_ones_own}, "BatchNorm statistics of the average with a step function"),
        (
            {"data": Stream(), "until": "9steps", "settings": {"model.swa": {"start": "5steps", "every": "1steps"}}},
            "BatchNorm statistics of the average with training data without a length",
        ),
    ],
    ids=["by the clock", "after the end", "two averages", "own step", "stream"],
)
def test_what_is_not_supported_is_refused(change: dict[str, Any], error: str) -> None:
    its = Objects()
    settings = {**QUICK, "model.swa": {"start": "0.5run", "every": "1steps"}}
    options = {"data": its.loader, "optimizer": its.optimizer, "quiet": True, "settings": settings, **change}
    with pytest.raises(TrainwrightError, match=error):
        tw.fit(its.model, loss=its.loss, **options)


TWO_RANKS = """
import json, torch, trainwright as tw
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
data = torch.randn(32, 4), torch.randint(2, (32,))
swa = {"start": "4steps", "every": "2steps", "lr": 0.05}
result = tw.fit(model, data, nn.CrossEntropyLoss(), optimizer="sgd", lr=0.1, batch=8, steps=8, quiet=True,
                settings={"model.swa": swa, "log.doctor": False})
live = [buffer.tolist() for buffer in model.buffers()]
with result.state.ema.swapped():
    print(json.dumps([live, [buffer.tolist() for buffer in model.buffers()], result.state.ema.num_updates]))
"""


def test_ranks_have_the_same_average(tmp_path: Path) -> None:
    done = ranks.finish(TWO_RANKS, 2, cwd=tmp_path)
    first, second = (json.loads(each.stdout.splitlines()[-1]) for each in done)
    assert first[1] == second[1] and first[0] != first[1]
    assert (first[1][2], first[2]) == (4, 3)
