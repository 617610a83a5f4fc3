"""Experiments: each replays a recorded step with its own changes and returns a measurement."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

from trainwright.replay.session import ReplaySession
from trainwright.runs.json_values import Facts, strict

When: TypeAlias = Literal["checkup", "first", "incident", "requested", "unlimited"]
Run: TypeAlias = Callable[[ReplaySession], Facts]


class HasExperiment(Protocol):
    """A measurement: a dataclass of ``doctor/facts``. ``experiment`` is the name of the experiment that makes it."""

    experiment: ClassVar[str]


@dataclass(frozen=True)
class Experiment:
    """An experiment on a recorded step.

    Attributes:
        when: "checkup" (at every examination), "first" (once), "incident" (at a non-finite step), "requested" (by a
            check), or "unlimited" (at every examination without a time limit).
        memory: Maximum memory, as a multiple of the prediction of ``ReplayMemory`` for the step.
        steps: Approximate duration in training steps.
        value: Experiments with a larger ``value / steps`` run first.
        latest: The last step for which it is informative.
    """

    name: str
    when: When
    run: Run
    memory: float
    steps: float
    value: float
    latest: float

    @property
    def rank(self) -> float:
        """Sort key: cheap experiments, and those that find the most frequent faults, run first."""
        return self.steps / self.value


DEFAULT_MEMORY = 1.25
"""Memory of an experiment that replays the step unchanged and keeps results / memory of the step."""
DEFAULT_STEPS = 2.0
"""Duration of an experiment that replays a step unchanged and once with a change, in training steps."""


def replay(
    kind: type[HasExperiment],
    *,
    when: When,
    steps: float = DEFAULT_STEPS,
    value: float = 1.0,
    latest: float = math.inf,
    memory: float = DEFAULT_MEMORY,
) -> Callable[[Callable[[ReplaySession], Any]], Experiment]:
    """Makes a decorator that turns a function of a ReplaySession, which returns a ``kind``, into an Experiment.

    Add the result to ``doctor.measure.REPLAYS``. ``steps`` is the sum over its replays: about 0.4 for a forward pass,
    1.2 with the backward pass, 1.4 with the update, three times as much in float64.
    """

    def made(run: Callable[[ReplaySession], Any]) -> Experiment:
        def facts(session: ReplaySession) -> Facts:
            return dict(strict(vars(run(session))))

        return Experiment(kind.experiment, when, facts, memory, steps, value, latest)

    return made
