"""Experiments on a recorded step, by name: each runs it again in its own way and gives plain values."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trainwright.replay.session import ReplaySession

When = Literal["checkup", "first", "incident", "asked"]
Run = Callable[[ReplaySession], dict[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """``when``: at every checkup, at the first one only, at an incident, or when a check asks for it."""

    name: str
    when: When
    run: Run


EXPERIMENTS: dict[str, Experiment] = {}


def experiment(name: str, *, when: When) -> Callable[[Run], Run]:
    """Registers a function of a Bench that returns JSON values."""

    def register(run: Run) -> Run:
        assert name not in EXPERIMENTS, name
        EXPERIMENTS[name] = Experiment(name, when, run)
        return run

    return register


def load_all() -> None:
    """Imports every file of experiments once."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
