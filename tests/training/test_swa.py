"""Stochastic weight averaging against the loop of torch's documentation, and across a stop and a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.errors import TrainwrightError
from trainwright.state.average import Swa
from trainwright.state.codec import same_bits
from trainwright.state.manifest import name_of
from trainwright.state.weights import plain_state_dict, read_weights

pytestmark = [pytest.mark.process, pytest.mark.slow]  # each starts threads that read the machine

EPOCHS, PER_EPOCH, SWA_START = 9, 5, 3
SWA = {"start": f"{SWA_START + 2}ep", "every": "1ep", "lr": 0.03, "anneal": "3ep"}
"""The loop of torch averages first after the epoch of index swa_start + 1."""


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
    """The example in the documentation of ``AveragedModel``. Returns both models, and the learning rate of each step."""
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
    options: dict[str, Any] = {"optimizer": its.optimizer, "schedule": its.schedule, "epochs": EPOCHS, "quiet": True}
    options["settings"] = {"model.swa": swa, "schedule.every": "1ep", "checkpoint.keep": 9, **(settings or {})}
    observers = [lambda result, state: lrs.append(result.lr), *more.pop("observers", ())]
    torch.manual_seed(4)
    return tw.fit(its.model, its.loader, its.loss, observers=observers, **options, **more), lrs


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
    result, its_lrs = fitted(dtype)
    assert result.state is not None
    assert its_lrs == lrs
    require_same(plain_state_dict(result.state.model), model.state_dict())
    require_same(averaged(result), dict(swa_model.state_dict()))
    checkpoint = result.run / "checkpoints" / name_of(EPOCHS * PER_EPOCH)
    require_same(read_weights(checkpoint, average=True), dict(swa_model.state_dict()))
    require_same(read_weights(checkpoint), model.state_dict())
