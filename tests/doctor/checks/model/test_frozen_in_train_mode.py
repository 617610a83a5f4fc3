"""A teacher that only the loss function of the user holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trainwright as tw
from tests.doctor.checks.loops import mlp

Loss = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


def distillation(teacher: nn.Module) -> Loss:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return F.mse_loss(model(batch[0]), wanted)

    return loss


def watched(model: nn.Module, data: TensorDataset, loss: Loss, folder: Path) -> set[str]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, quiet=True) as watch:
        for _ in range(24):
            optimizer.zero_grad()
            loss(model, data[:]).backward()
            optimizer.step()
    return {each.code for each in watch.findings()}


def fitted(model: nn.Module, data: TensorDataset, loss: Loss, folder: Path) -> set[str]:
    result = tw.fit(model, data, loss, batch=32, steps=24, lr=1e-2, quiet=True, settings={"folder": str(folder)})
    return {each.code for each in result.findings}


@pytest.mark.slow
@pytest.mark.parametrize("run", [watched, fitted], ids=["watch", "fit"])
@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
def test_a_teacher_of_the_loss(
    run: Callable[[nn.Module, TensorDataset, Loss, Path], set[str]], is_training: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 8), torch.zeros(128))
    loss = distillation(mlp(nn.Dropout(0.5)).requires_grad_(False).train(is_training))
    assert ("model.frozen_in_train_mode" in run(mlp(), data, loss, tmp_path)) == is_training
