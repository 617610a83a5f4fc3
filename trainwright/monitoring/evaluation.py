"""Evaluates when due, without any effect on the training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor, nn

from trainwright.checkpoint.cursor import MicroBatch
from trainwright.checkpoint.optimizer_modes import averaged_weights
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.engine.evaluate import EvaluationResult, evaluate, evaluating
from trainwright.engine.loss import Loss
from trainwright.engine.metrics import NO_METRICS, MetricSet
from trainwright.engine.precision import Precision
from trainwright.engine.rank_sums import share_buffers
from trainwright.monitoring.cadence import Every


class EvaluationListener(Protocol):
    """Receives the result of each evaluation."""

    def evaluated(self, step: int, seen: EvaluationResult) -> None: ...


@dataclass(frozen=True)
class ValidationSet:
    """The batches for evaluations during a run, and for the evaluation at its end.

    ``count`` is the number of batches of ``in_course``; 0 means the full set.
    """

    in_course: Iterable[MicroBatch]
    at_end: Iterable[MicroBatch]
    count: int = 0


class PeriodicEvaluation:
    """Evaluates when due; ``last`` is the newest result.

    With an optimizer that averages the weights itself, such as ScheduleFree, the averaged weights are evaluated. The
    metric ``ema_loss`` or ``swa_loss`` is the loss of the average of the weights. With several sets, the loss is that
    of the first, and the name of each figure has the name of its set as a prefix.
    """

    def __init__(
        self,
        sets: Mapping[str, ValidationSet],
        loss: Callable[..., Loss | Tensor],
        every: Every,
        *,
        precision: Precision,
        listeners: Sequence[EvaluationListener] = (),
        world: World = SOLO,
        metrics: MetricSet = NO_METRICS,
    ) -> None:
        self._sets = sets
        self._loss = loss
        self._every = every
        self._world = world
        self._metrics = metrics
        self._precision, self._listeners = precision, listeners
        self._seen = (-1, False)
        self.last: EvaluationResult | None = None

    def due(self, state: TrainState) -> bool:
        return self._every.due(state)

    def __call__(self, state: TrainState) -> None:
        counts = max(each.count for each in self._sets.values())
        self._evaluate(state, {name: each.in_course for name, each in self._sets.items()}, counts)

    def before_training(self, state: TrainState, listeners: Sequence[EvaluationListener]) -> None:
        """Evaluate a pretrained model before its first step, as during the run.

        Only ``listeners`` receive the result: a schedule or the choice of the best checkpoint does not depend on it.
        """
        sets = {name: each.in_course for name, each in self._sets.items()}
        seen = self._of_all(state, sets, max(each.count for each in self._sets.values()))
        for listener in listeners:
            listener.evaluated(state.step, seen)

    def finish(self, state: TrainState) -> None:
        """Evaluate the last step as during the run, unless that was done, and then on the full set.

        The evaluation as during the run decides which checkpoint is the best.
        """
        if self._seen != (state.step, state.ema.is_complete):  # an average may be completed after the last step
            self(state)
        if any(each.at_end is not each.in_course for each in self._sets.values()):
            self._evaluate(state, {name: each.at_end for name, each in self._sets.items()}, 0)

    def _evaluate(self, state: TrainState, sets: Mapping[str, Iterable[MicroBatch]], count: int) -> None:
        seen = self._of_all(state, sets, count)
        self._seen, self.last = (state.step, state.ema.is_complete), seen
        for listener in self._listeners:
            listener.evaluated(state.step, seen)

    def _of_all(self, state: TrainState, sets: Mapping[str, Iterable[MicroBatch]], count: int) -> EvaluationResult:
        if self._world.size > 1:
            share_buffers(state, self._world)
        with averaged_weights(state.optimizer):
            each_seen = {name: self._evaluated(state.model, batches, self._metrics) for name, batches in sets.items()}
            begin_s = time.perf_counter()
            with evaluating(state.model):
                of_model = self._metrics.measure(state.model, self._world)
            measure_s = time.perf_counter() - begin_s
        seen, first = _combined(each_seen), next(iter(sets.values()))
        if state.ema.is_complete:
            with state.ema.swapped():
                average = self._evaluated(state.model, first, NO_METRICS)
            metrics = {**seen.metrics, f"{state.ema.kind}_loss": average.loss}
            seen = replace(seen, metrics=metrics, seconds=seen.seconds + average.seconds)
        metrics = {**seen.metrics, **of_model}
        return replace(seen, metrics=metrics, seconds=seen.seconds + measure_s, batches=count)

    def _evaluated(self, model: nn.Module, batches: Iterable[MicroBatch], metrics: MetricSet) -> EvaluationResult:
        return evaluate(model, self._loss, batches, precision=self._precision, world=self._world, metrics=metrics)


def _combined(sets: Mapping[str, EvaluationResult]) -> EvaluationResult:
    """Return the result of the first set, with the figures of all by name if there are several."""
    first = next(iter(sets.values()))
    if len(sets) == 1:
        return first
    figures = {f"{name}.{key}": value for name, seen in sets.items() for key, value in seen.figures.items()}
    shown = {f"{name}/{key}": value for name, seen in sets.items() for key, value in seen.shown.items()}
    return replace(first, metrics=figures, seconds=sum(seen.seconds for seen in sets.values()), shown=shown)
