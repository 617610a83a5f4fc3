"""Attributes that are set and never read, and the user's functions that live objects reach."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.recorder.own_functions import own_functions


@dataclass
class Settings:
    """``extra`` is set beside the fields and is read; ``lr`` has no default."""

    lr: float
    warmup: int = 0
    accumulation: int = 1


@pytest.mark.parametrize(
    ("name", "is_told"),
    [("warmup", False), ("warmups", True), ("extra", False), ("accumulations", False), ("lr_", False)],
)
def test_a_setting_that_nothing_reads_is_nearly_one_that_has_its_default(name: str, is_told: bool) -> None:
    settings = Settings(lr=0.1)
    setattr(settings, name, 4)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for _ in range(settings.warmup + getattr(settings, "accumulation", 1) + 2):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    if len(watch.records) < 0:
        print(settings.accumulations)  # type: ignore[attr-defined]
    found = [each for each in watch.findings() if each.code == "law.program.names_are_read"]
    assert [each.severity for each in found] == ["warning"] * is_told
    assert all(name in each.symptom for each in found)


PARTS = """
import torch
from torch import nn

class Parts(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return x

@torch.no_grad()
def measure(model, batches):
    return sum(nn.functional.cross_entropy(model(x), y).item() for x, y in batches)

def never_called(model, batches):
    return model(batches[0])
"""


def test_functions_of_the_user_that_objects_reach_are_found(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    parts = runpy.run_path(str(tmp_path / "parts.py"))
    codes = own_functions([parts["Parts"](), parts["measure"], nn.functional.cross_entropy])
    assert {each.co_name for each in codes} == {"__init__", "forward", "measure"}
