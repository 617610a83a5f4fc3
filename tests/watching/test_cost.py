"""What a calm step costs under a watch, in calls of Python functions: seconds are for ``benchmarks/watch_overhead``."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw
from trainwright.watching import schedule, session

CALM, COUNTED = 128, 32
MOST = 247
"""Calls a step, each of about a microsecond between two operations of torch. Most are the events of a step and the
listeners that hear them. A listener that needs more than a few should not read every step."""


def calls_by_step(watching: bool) -> list[Counter[str]]:
    """The calls of Python functions in each of COUNTED calm steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x, y = torch.randn(16, 8), torch.randint(3, (16,))
    found: list[Counter[str]] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found[-1][f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"] += 1

    watch: AbstractContextManager[object] = tw.watch(model, optimizer, out=None, quiet=True)
    with watch if watching else nullcontext():
        for step in range(CALM + COUNTED):
            if step >= CALM:
                found.append(Counter())
                sys.setprofile(count)
            optimizer.zero_grad()
            F.cross_entropy(model(x.clone()), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sys.setprofile(None)
    return found


@pytest.mark.slow
def test_a_calm_step_makes_few_calls_more_than_it_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")  # with it every step is observed in full
    monkeypatch.setattr(schedule, "SHORT_S", math.inf)  # on a busy machine a step takes longer, and is judged alone
    watched, alone = calls_by_step(True), calls_by_step(False)
    more = [sum(each.values()) - sum(alone[0].values()) for each in watched]
    usual = watched[more.index(statistics.median_low(more))] - alone[0]
    assert statistics.median_low(more) < MOST, usual.most_common(50)
    assert statistics.median_low(more) > 0


@pytest.mark.parametrize(("short_s", "most", "least"), [(math.inf, 8, 4), (0.0, 99, 16)], ids=["short", "long"])
def test_after_a_long_calm_full_steps_are_rare_if_steps_are_short(
    monkeypatch: pytest.MonkeyPatch, short_s: float, most: int, least: int
) -> None:
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")
    monkeypatch.setattr(session, "SHORT_STEP_S", short_s)
    monkeypatch.setattr(session, "LONG_CALM", 64)
    torch.manual_seed(0)
    model, x = nn.Linear(8, 3), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    full = 0
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for step in range(256):
            optimizer.zero_grad()
            model(x.clone()).square().mean().backward()
            full += step >= 128 and not watch.session._is_calm
            optimizer.step()
    assert least <= full <= most
