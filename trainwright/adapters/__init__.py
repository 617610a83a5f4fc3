"""Callbacks that run ``tw.watch`` in the loops of other libraries. ``import trainwright`` imports none of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from trainwright.watching.experiments import UserCheck


class WatchChoices(TypedDict, total=False):
    """The options of ``tw.watch`` for a callback. Model, optimizer and loader come from the trainer."""

    loss: object
    accumulation: int | None
    out: str | Path | None
    on_nonfinite: Literal["skip", "stop", "observe"]
    on_spike: Literal["warn", "skip", "rollback"]
    skip: str | Path | Iterable[Iterable[int]]
    keep: int
    memory_bytes: int | None
    patience_s: float
    checks: str | UserCheck | Sequence[str | UserCheck]
    examine: Literal["budget", "all", "listen"]
    check: bool
    like: str | Path | None
    profile: bool | int
    layers: bool
    sinks: Sequence[str]
    alerts: Mapping[str, object] | None
    quiet: bool
