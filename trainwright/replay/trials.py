"""Trials: a remedy is tried on a recorded step before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

Trial: TypeAlias = Callable[..., str]
"""Maps ``(session, **args)`` to text on the outcome, with numbers. Raises NotTried."""


class NotTried(Exception):
    """A remedy cannot be tried on this step. The message has the reason."""


DEFAULT_STEPS = 24.0
"""Duration of a trial in training steps: eight unchanged updates, and eight with the remedy."""


class RegisteredTrial(NamedTuple):
    """A trial. ``steps`` is its approximate duration in training steps."""

    run: Trial
    steps: float


def course(losses: Sequence[float]) -> str:
    """Returns text on the first and the last of some losses."""
    return f"{losses[0]:.4g} -> {losses[-1]:.4g}"
