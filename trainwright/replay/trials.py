"""Trials: a remedy is tried on a recorded step before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from trainwright.replay.session import ReplaySession

Trial: TypeAlias = Callable[..., str]
"""``(session, **args)`` -> the outcome, in words with numbers. Raises NotTried."""


class NotTried(Exception):
    """A remedy cannot be tried on this step; the message says why."""


USUAL_STEPS = 24.0
"""Training steps that a trial takes as long as: eight updates as it was, and eight with the remedy."""


class RegisteredTrial(NamedTuple):
    """``steps``: about how many training steps it takes as long as."""

    run: Trial
    steps: float


TRIALS: dict[str, RegisteredTrial] = {}
"""All trials by name."""


def trial(name: str, *, steps: float = USUAL_STEPS) -> Callable[[Trial], Trial]:
    """Register a function that tries a remedy. ``steps``: about how many training steps it takes as long as."""

    def register(function: Trial) -> Trial:
        assert name not in TRIALS, name
        TRIALS[name] = RegisteredTrial(function, steps)
        return function

    return register


def attempt(name: str, session: ReplaySession, args: Mapping[str, object]) -> str:
    """Runs the trial ``name`` and returns its outcome. Raises NotTried."""
    if name not in TRIALS:
        raise NotTried(f"there is no trial {name!r}")
    return TRIALS[name].run(session, **args)


def course(losses: Sequence[float]) -> str:
    """The first and the last of some losses, in words."""
    return f"{losses[0]:.4g} -> {losses[-1]:.4g}"
