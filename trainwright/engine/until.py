"""How long a run is: the share of it that is used, from the state alone."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.errors import UsageError
from trainwright.state.train_state import TrainState

Until = Callable[[TrainState], float]
"""The share of the run that is used: 0 at its start, done at 1."""


def for_steps(count: int) -> Until:
    """A run of ``count`` optimizer steps."""
    return _until(count, lambda state: state.step / count)


def for_seconds(budget_s: float) -> Until:
    """A run of ``budget_s`` seconds of training time, evaluation and saving not counted."""
    return _until(budget_s, lambda state: state.elapsed_s / budget_s)


def _until(amount: float, until: Until) -> Until:
    if not amount > 0:
        raise UsageError(f"a run lasts longer than {amount!r}", remedy="write for_steps(1000) or for_seconds(60)")
    return until
