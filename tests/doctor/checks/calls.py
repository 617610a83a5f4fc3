"""Builds records of steps from their calls, for tests of checks that need only records."""

from __future__ import annotations

from typing import Any

from tests.doctor.checks.loops import made_of
from trainwright.doctor.discovery import check_of
from trainwright.runs.records import Watched

F = ("forward", [0, True, True])
B = ("backward", {"carried": False, "cut": False, "retain": False})
CARRIED = ("backward", {"carried": True, "cut": False, "retain": False})
Z, S, L, U = ("zero_grad", 0), ("step", {"optimizer": 0, "autocast": False}), ("schedule", "StepLR"), ("unscale", 0)
HEALTHY = (Z, F, B, S)


def steps(*events: Any, count: int = 4, losses: tuple[float, ...] = (), **values: Any) -> list[Watched]:
    norm = values.pop("grad_norm", 5.0)
    return [
        Watched(
            time_s=0.0, step=n + 1, loss=losses[n] if losses else 2.0, grad_norm=norm, lr=0.1, events=events,
            values=values,
        )
        for n in range(len(losses) or count)
    ]  # fmt: skip


def fires(code: str, *facts: tuple[int, object], made: list[Watched], finished: bool = True) -> list[str]:
    check = check_of(code)
    assert check is not None
    return [each.severity for each in made_of(check, *facts, steps=made, finished=finished)]
