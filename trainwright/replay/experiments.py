"""Experiments: each runs a recorded step again in its own way and returns what it measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from trainwright.replay.session import ReplaySession
from trainwright.runs.json_values import Facts, strict

When: TypeAlias = Literal["checkup", "first", "incident", "requested"]
Run: TypeAlias = Callable[[ReplaySession], Facts]


class HasExperiment(Protocol):
    """A measurement of ``doctor/facts``."""

    experiment: ClassVar[str]


@dataclass(frozen=True)
class Experiment:
    """``when``: at every checkup, at the first one only, at an incident, or when a check requests it.

    ``memory``: how many times what ``ReplayMemory`` predicts for the step it takes at most.
    ``by_samples``: where there is less, it may run on some samples of each micro-batch.
    ``steps``: about how many training steps it takes as long as. ``value``: experiments with a larger ``value / steps``
    run first. ``latest`` is the last step that it tells anything about.
    """

    name: str
    when: When
    run: Run
    memory: float
    by_samples: bool
    steps: float
    value: float
    latest: float

    @property
    def rank(self) -> float:
        """Experiments of a lower rank run first: what is cheap, and what the most frequent faults show in."""
        return self.steps / self.value


USUAL_MEMORY = 1.25
"""Of an experiment that runs the step as it was: what it keeps beside it is a fraction of it."""
USUAL_STEPS = 2.0
"""Training steps that an experiment takes as long as which runs a step as it was and once with a change."""


def replay(
    kind: type[HasExperiment],
    *,
    when: When,
    steps: float = USUAL_STEPS,
    value: float = 1.0,
    latest: float = math.inf,
    memory: float = USUAL_MEMORY,
    by_samples: bool = False,
) -> Callable[[Callable[[ReplaySession], Any]], Experiment]:
    """Make an Experiment of a function of a ReplaySession that returns a measurement of ``kind``.

    ``doctor.measure.REPLAYS`` lists it. ``steps`` counts replays: about 0.4 for a forward pass, 1.2 with the backward
    pass, 1.4 with the update, three times as many in float64.
    """

    def made(run: Callable[[ReplaySession], Any]) -> Experiment:
        def facts(session: ReplaySession) -> Facts:
            return dict(strict(vars(run(session))))

        return Experiment(kind.experiment, when, facts, memory, by_samples, steps, value, latest)

    return made
