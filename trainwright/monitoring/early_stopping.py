"""Ends a run whose validation no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from trainwright.checkpoint.codec import StateDict
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.observer import Stop
from trainwright.engine.step import StepResult
from trainwright.errors import UsageError, require_choice
from trainwright.recipe.catalog import mode_of


class EarlyStopping:
    """An observer that ends a run whose validation has stopped improving. Its counter is part of each checkpoint.

    Args:
        patience: Number of successive evaluations without an improvement after which the run ends.
        metric: ``loss``, or any metric of the validation.
        min_delta: The minimum change that counts as an improvement.
        mode: ``min`` if a smaller value is better, ``max`` if a larger one is. Default: known for losses and built-in
            metrics.

    Raises:
        UsageError: ``patience`` or ``min_delta`` is out of range, or ``mode`` is missing for a metric of your own.
    """

    needs_evaluation = True

    def __init__(
        self,
        patience: int = 3,
        metric: str = "loss",
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise UsageError(f"patience is {patience!r}", remedy="pass the number of evaluations to wait: patience=3")
        if not 0 <= min_delta < math.inf:
            raise UsageError(f"min_delta is {min_delta!r}", remedy="pass a number of at least 0: min_delta=0.001")
        if (mode := mode or mode_of(metric)) is None:
            raise UsageError(
                f"it is unknown if a larger {metric} is better", remedy=f"EarlyStopping(metric={metric!r}, mode='max')"
            )
        require_choice("mode", mode, ("min", "max"))
        self.patience = patience
        self.metric = metric
        self.min_delta = min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self.best: float | None = None
        self.waited = 0
        """Successive evaluations without an improvement."""

    def observe(self, result: StepResult, _state: TrainState) -> Stop | None:
        if result.evaluation is None:
            return None
        value = result.evaluation.figure(self.metric)
        if math.isfinite(value) and (self.best is None or self._sign * (self.best - value) > self.min_delta):
            self.best, self.waited = value, 0
            return None
        self.waited += 1
        if self.waited < self.patience:
            return None
        best = "never finite" if self.best is None else f"not better than {self.best:.6g}"
        return Stop(f"early stopping: {self.metric} was {best} in {self.waited} evaluations")

    def state_dict(self) -> StateDict:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        best, waited = saved["best"], saved["waited"]
        if not isinstance(waited, int) or not isinstance(best, float | None):
            raise ValueError(f"the state of an EarlyStopping is {dict(saved)}")
        self.best, self.waited = best, waited

    def close(self) -> None: ...
