"""Trials: a remedy is tried on a recorded step before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

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


def course(losses: Sequence[float]) -> str:
    """The first and the last of some losses, in words."""
    return f"{losses[0]:.4g} -> {losses[-1]:.4g}"
