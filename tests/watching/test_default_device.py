"""A default device is for the user's tensors: what is ours is made where it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Tensors that do not say where they are made would have no values."""
    torch.manual_seed(0)
    yield
    torch.set_default_device(None)


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_a_watched_loop_is_judged_as_ever() -> None:
    x = torch.randn(40, 32, 20)
    y = x[:, :, :4].argmax(2)
    model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # Adam makes its count of steps on the default device
    watch = tw.watch(model, optimizer, out=None, quiet=True)
    torch.set_default_device("meta")
    with watch:
        for step, (inputs, labels) in enumerate(zip(x, y), 1):
            optimizer.zero_grad()
            output = model(inputs) * (torch.inf if step == 30 else 1.0)
            F.cross_entropy(output, labels).backward()
            optimizer.step()
    assert [(found.code, found.step) for found in watch.findings()] == [("precision.overflow", 30)]
    assert not watch.session.failures


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_fit_trains_and_saves_as_ever(tmp_path: Path) -> None:
    x = torch.randn(256, 20)
    y = x[:, :4].argmax(1)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
    torch.set_default_device("meta")
    how = {"until": "60steps", "batch": 32, "device": "cpu", "quiet": True, "settings": {"folder": str(tmp_path)}}
    result = tw.fit(model, (x, y), nn.CrossEntropyLoss(), **how)  # type: ignore[arg-type]
    assert result.ending == "finished" and result.loss is not None and result.loss < 1.3
