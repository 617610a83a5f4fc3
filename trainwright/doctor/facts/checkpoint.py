"""Measurements of loaded states, and of the steps after loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class MomentsFacts:
    """The state of one optimizer just before its first update since the watch began or its state was loaded.

    Attributes:
        kind: Class of the optimizer.
        with_state: Number of parameters that have a gradient and a state.
        steps: The highest update count of a parameter.
    """

    kind: str
    with_state: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """Calls of one scheduler: ``before`` the watch, ``calls`` since then, and ``updates`` of the weights since then."""

    before: int
    calls: int
    updates: int


@dataclass(frozen=True, kw_only=True)
class LoadFacts:
    """A call of ``load_state_dict`` on a model.

    Attributes:
        step: Number of updates before the call.
        tensors: Number of tensors of the model.
        missing: Names that the model has and the state lacks.
        unexpected: Names that the state has and the model lacks.
        prefix: The prefix that, added to or removed from the unexpected names, makes them the missing ones.
    """

    step: int
    tensors: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    prefix: str | None = None


@dataclass(frozen=True, kw_only=True)
class OverwrittenFacts:
    """Weights that were loaded before the first forward call.

    Attributes:
        weights: Number of loaded weights.
        gone: Number of weights that have other values at the first forward call.
        fraction: Fraction of the loaded elements in these weights.
    """

    weights: int
    gone: int
    fraction: float


@dataclass(frozen=True, kw_only=True)
class ResumeFacts:
    """Optimizers, schedulers and loads around the start of the watch."""

    experiment: ClassVar[str] = "resume"
    optimizers: tuple[MomentsFacts, ...] = ()
    schedules: tuple[ScheduleFacts, ...] = ()
    loads: tuple[LoadFacts, ...] = ()
    overwritten: OverwrittenFacts | None = None
