"""Trials: a remedy is tried on a recorded step before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from trainwright.replay.session import ReplaySession

Trial: TypeAlias = Callable[..., str]
"""``(session, **args)`` -> the outcome, in words with numbers. Raises NotTried."""


class NotTried(Exception):
    """A remedy cannot be tried on this step; the message says why."""


TRIALS: dict[str, Trial] = {}
"""All trials by name."""


def trial(name: str) -> Callable[[Trial], Trial]:
    """Registers a function that tries a remedy."""

    def register(function: Trial) -> Trial:
        assert name not in TRIALS, name
        TRIALS[name] = function
        return function

    return register


def attempt(name: str, session: ReplaySession, args: Mapping[str, object]) -> str:
    """Runs the trial ``name`` and returns its outcome. Raises NotTried."""
    if name not in TRIALS:
        raise NotTried(f"there is no trial {name!r}")
    return TRIALS[name](session, **args)


def course(losses: Sequence[float]) -> str:
    """The first and the last of some losses, in words."""
    return f"{losses[0]:.4g} -> {losses[-1]:.4g}"
