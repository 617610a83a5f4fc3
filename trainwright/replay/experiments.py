"""Experiments: each runs a recorded step again in its own way and returns what it measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts

When: TypeAlias = Literal["checkup", "first", "incident", "requested"]
Run: TypeAlias = Callable[[ReplaySession], Facts]


@dataclass(frozen=True)
class Experiment:
    """``when``: at every checkup, at the first one only, at an incident, or when a check requests it.

    ``memory``: how many times what ``ReplayMemory`` foretells for the step it takes at most.
    ``by_samples``: where there is less, it may run on some samples of each micro-batch.
    """

    name: str
    when: When
    run: Run
    memory: float
    by_samples: bool


USUAL_MEMORY = 1.25
"""Of an experiment that runs the step as it was: what it keeps beside it is a fraction of it."""
EXPERIMENTS: dict[str, Experiment] = {}
"""All experiments by name."""


def experiment(
    name: str, *, when: When, memory: float = USUAL_MEMORY, by_samples: bool = False
) -> Callable[[Run], Run]:
    """Registers a function of a ReplaySession that returns JSON values. ``name`` is written into the log."""

    def register(run: Run) -> Run:
        assert name not in EXPERIMENTS, name
        EXPERIMENTS[name] = Experiment(name, when, run, memory, by_samples)
        return run

    return register
