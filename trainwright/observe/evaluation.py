"""Evaluation when it is due; it changes nothing of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from trainwright.engine.evaluate import EvaluationResult, evaluate
from trainwright.engine.loss import Loss
from trainwright.engine.precision import Precision
from trainwright.observe.cadence import Every
from trainwright.state.cursor import MicroBatch
from trainwright.state.ema import Ema
from trainwright.state.train_state import TrainState


class EvaluationListener(Protocol):
    """Is called with the result of each evaluation."""

    def evaluated(self, step: int, seen: EvaluationResult) -> None: ...


class PeriodicEvaluation:
    """Evaluates when due; ``last`` is the newest result. With EMA, the metric ``ema_loss`` is that of the average."""

    def __init__(
        self,
        batches: Iterable[MicroBatch],
        loss: Callable[..., Loss | Tensor],
        every: Every,
        *,
        precision: Precision,
        listeners: Sequence[EvaluationListener] = (),
    ) -> None:
        self._batches, self._loss, self._every = batches, loss, every
        self._precision, self._listeners = precision, listeners
        self.last: EvaluationResult | None = None

    def due(self, state: TrainState) -> bool:
        return self._every.due(state)

    def __call__(self, state: TrainState) -> None:
        seen = evaluate(state.model, self._loss, self._batches, precision=self._precision)
        if isinstance(state.ema, Ema):
            with state.ema.swapped():
                average = evaluate(state.model, self._loss, self._batches, precision=self._precision)
            metrics = {**seen.metrics, "ema_loss": average.loss}
            seen = replace(seen, metrics=metrics, seconds=seen.seconds + average.seconds)
        self.last = seen
        for listener in self._listeners:
            listener.evaluated(state.step, seen)
