"""Whether a run has statistics by layer, and what makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch.optim import Optimizer

from trainwright.observe.layer_stats import LayerLog, LayerObserver, LayerStats, scalars_of
from trainwright.observe.logbook import Logbook
from trainwright.runlog.records import Layers
from trainwright.state.chained import parts_of
from trainwright.state.train_state import TrainState
from trainwright.training.job import Job


class OwnStepLayers(LayerObserver):
    """The same of a step of the user's own, which calls the optimizers itself, in any order.

    What an optimizer updates that computes gradients itself (LBFGS) is not measured: it has none before its update.
    """

    def __init__(self, log: LayerLog, state: TrainState) -> None:
        super().__init__(log)
        self._state = state
        self._handles = [each.register_step_pre_hook(self._before) for each in parts_of(state.optimizer)]

    def _before(self, optimizer: Optimizer, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        if not any(map(callable, (*args, *kwargs.values()))):
            self._log.before_update(self._state.step + 1, optimizer)

    def close(self) -> None:
        for each in self._handles:
            each.remove()
        super().close()


def layer_observers(job: Job, logbook: Logbook) -> Iterator[LayerObserver]:
    """One, or none: ranks that divide a layer would have to put it together.

    Of ranks with whole copies the first one measures: gradients and updates are those of all, activations its own. A
    compiled model is not hooked: it would be compiled again.
    """
    if not job.recipe.log.layers or job.divides_weights:
        return
    stats = LayerStats(job.parts.model, activations=not job.recipe.model.compile)

    def write(record: Layers) -> None:
        logbook.journal.write(record)
        for sink in logbook.sinks:
            sink.scalars(record.step, scalars_of(record, [layer.path for layer in stats.layers]))

    if stats.layers:
        log = LayerLog(stats, write)
        yield LayerObserver(log) if job.parts.advance is None else OwnStepLayers(log, job.state)
