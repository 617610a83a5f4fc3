"""Windows of one series that overlap between training and validation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

LENGTH = 24


class Forecast(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.head = nn.Linear(LENGTH * channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1))
        return out


def symptom(split: str, channels: int, *, layout: str = "time first") -> str | None:
    torch.manual_seed(0)
    series = torch.randn(1200, channels).cumsum(0)
    x = series.unfold(0, LENGTH, 1).transpose(1, 2)  # (windows, time, channels)
    y = x[1:, -1, :1]
    x = x[:-1].transpose(1, 2) if layout == "channels first" else x[:-1].squeeze(2) if layout == "flat" else x[:-1]
    order = torch.randperm(len(x)) if split == "random" else torch.arange(len(x))
    train, val = order[:900], order[900:] if split == "random" else order[900 + LENGTH :]
    model = Forecast(channels)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(3):
            for at in train[torch.randperm(len(train))].split(32):
                optimizer.zero_grad()
                F.mse_loss(model(x[at]), y[at]).backward()
                optimizer.step()
            with torch.no_grad():
                for at in val.split(64):
                    F.mse_loss(model(x[at]), y[at])
    assert watch.session.failures == []
    found = [each.symptom for each in watch.findings() if each.code == "data.train_val_overlap"]
    return found[0] if found else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "layout"), [(2, "time first"), (3, "channels first"), (1, "time first"), (1, "flat")]
)
def test_a_random_split_of_overlapping_windows_is_found(channels: int, layout: str) -> None:
    assert "windows overlap" in (symptom("random", channels, layout=layout) or "")


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_a_split_in_time_is_healthy(channels: int) -> None:
    assert symptom("in time", channels) is None
