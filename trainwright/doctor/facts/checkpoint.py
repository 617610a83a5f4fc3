"""What is measured of states that are loaded, and of what goes on after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class MomentsFacts:
    """The state of one optimizer right before its first update since the watch began, or since it was loaded.

    Of ``parameters`` with a gradient ``with_state`` have a state; ``least_steps`` and ``most_steps`` are their counts
    of updates.
    """

    kind: str
    parameters: int
    with_state: int
    least_steps: int
    most_steps: int


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """A scheduler: how often it had been stepped before the watch, and how often since; and the updates since."""

    before: int
    calls: int
    updates: int


@dataclass(frozen=True, kw_only=True)
class LoadFacts:
    """A call of ``load_state_dict`` on a model, after update ``step``: how many tensors it has, and which had no place.

    ``prefix``: with it put before the unexpected names, or taken off them, they are the missing ones.
    """

    step: int
    tensors: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    prefix: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResumeFacts:
    """All of this, as far as it is known."""

    experiment: ClassVar[str] = "resume"
    optimizers: tuple[MomentsFacts, ...] = ()
    schedules: tuple[ScheduleFacts, ...] = ()
    loads: tuple[LoadFacts, ...] = ()
