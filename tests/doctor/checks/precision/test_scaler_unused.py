"""A GradScaler that the watch is given and that scales no loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainwright as tw


@pytest.mark.parametrize(("is_used", "is_enabled"), [(False, True), (True, True), (False, False)])
def test_a_scaler_that_scales_no_loss_is_found(is_used: bool, is_enabled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
    with tw.watch(model, optimizer, scaler=scaler, out=None, quiet=True, examine="listen") as watch:
        for _ in range(12):
            x = torch.randn(8, 4)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            if is_used:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
    expected = ["precision.scaler_unused"] if is_enabled and not is_used else []
    assert [each.code for each in watch.findings()] == expected
