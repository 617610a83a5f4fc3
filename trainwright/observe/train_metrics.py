"""Metrics over the training batches since the last record of the log."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.engine.metrics import MetricSet, OutputKeeper
from trainwright.engine.step import StepResult
from trainwright.state.train_state import TrainState


class TrainMetrics:
    """An Observer: passes what the forward passes of a step gave on to the metrics, until somebody asks for ``values``.

    ``keeper`` is for the step function that trains; None without metrics.
    """

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics, self._has_seen = metrics, False
        self.keeper = OutputKeeper() if metrics else None

    def observe(self, result: StepResult, state: TrainState) -> None:
        if self.keeper is None:
            return
        seen = self.keeper.taken()
        if seen and not (result.skipped.device.type == "cpu" and bool(result.skipped)):  # these are hardly finite
            self._metrics.update(seen)
            self._has_seen = True

    def values(self) -> Mapping[str, float]:
        """The metrics over what was seen since the last call."""
        if not self._has_seen:
            return {}
        self._has_seen = False
        return self._metrics.compute()

    def close(self) -> None: ...
