"""Evaluation when it is due; it changes nothing of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, nn

from trainwright.engine.evaluate import EvaluationResult, evaluate
from trainwright.engine.loss import Loss
from trainwright.engine.over_ranks import share_buffers
from trainwright.engine.precision import Precision
from trainwright.observe.cadence import Every
from trainwright.state.cursor import MicroBatch
from trainwright.state.ema import Ema
from trainwright.state.train_state import TrainState
from trainwright.world.group import SOLO, World


class EvaluationListener(Protocol):
    """Is called with the result of each evaluation."""

    def evaluated(self, step: int, seen: EvaluationResult) -> None: ...


@dataclass(frozen=True)
class ValidationSet:
    """What is evaluated in the course of a run, which is ``count`` batches (0: the whole set), and at its end."""

    in_course: Iterable[MicroBatch]
    at_end: Iterable[MicroBatch]
    count: int = 0


class PeriodicEvaluation:
    """Evaluates when due; ``last`` is the newest result. With EMA, the metric ``ema_loss`` is that of the average."""

    def __init__(
        self,
        batches: ValidationSet,
        loss: Callable[..., Loss | Tensor],
        every: Every,
        *,
        precision: Precision,
        listeners: Sequence[EvaluationListener] = (),
        world: World = SOLO,
    ) -> None:
        self._batches, self._loss, self._every, self._world = batches, loss, every, world
        self._precision, self._listeners = precision, listeners
        self._step = -1
        self.last: EvaluationResult | None = None

    def due(self, state: TrainState) -> bool:
        return self._every.due(state)

    def __call__(self, state: TrainState) -> None:
        self._evaluate(state, self._batches.in_course, self._batches.count)

    def finish(self, state: TrainState) -> None:
        """Evaluates the last step, if that was not done: as all before it, which the best is chosen by, and whole."""
        if self._step != state.step:
            self(state)
        if self._batches.at_end is not self._batches.in_course:
            self._evaluate(state, self._batches.at_end, 0)

    def _evaluate(self, state: TrainState, batches: Iterable[MicroBatch], count: int) -> None:
        if self._world.size > 1:
            share_buffers(state, self._world)
        seen = self._evaluated(state.model, batches)
        if isinstance(state.ema, Ema):
            with state.ema.swapped():
                average = self._evaluated(state.model, batches)
            metrics = {**seen.metrics, "ema_loss": average.loss}
            seen = replace(seen, metrics=metrics, seconds=seen.seconds + average.seconds)
        self._step, self.last = state.step, replace(seen, batches=count)
        for listener in self._listeners:
            listener.evaluated(state.step, self.last)

    def _evaluated(self, model: nn.Module, batches: Iterable[MicroBatch]) -> EvaluationResult:
        return evaluate(model, self._loss, batches, precision=self._precision, world=self._world)
