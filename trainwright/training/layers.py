"""Whether a run has statistics by layer, and what makes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from trainwright.assembly.retain_grad import retained_modules
from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.shards import is_divided
from trainwright.checkpoint.train_state import TrainState
from trainwright.monitoring.layer_stats import LayerLog, LayerObserver, LayerStats, scalars_of
from trainwright.monitoring.logbook import Logbook
from trainwright.monitoring.output_grads import OutputGradObserver, OutputGradStats
from trainwright.optim.clip import summed_over_parts
from trainwright.runs.records import Layers, OutputGrads
from trainwright.training.job import Job


class OwnStepLayers(LayerObserver):
    """The same of a step of the user's own, which calls the optimizers itself, in any order.

    What an optimizer updates that computes gradients itself (LBFGS) is not measured: it has none before its update.
    """

    def __init__(self, log: LayerLog[Layers], state: TrainState) -> None:
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


def layer_observers(job: Job, logbook: Logbook | None = None) -> Iterator[LayerObserver]:
    """What records statistics by layer, and gradients of outputs by module. ``logbook``: of the rank that writes."""
    yield from _of_layers(job, logbook)
    modules = retained_modules(job.state.model, job.recipe.log.retain_grad)
    if modules and logbook is not None:
        yield _of_outputs(OutputGradStats(modules), logbook)


def _of_outputs(stats: OutputGradStats, logbook: Logbook) -> OutputGradObserver:
    def write(record: OutputGrads) -> None:
        logbook.journal.write(record)
        values = {f"output_grad_norm/{path}": each for path, each in zip(stats.paths, record.norm) if each == each}
        for sink in logbook.sinks:
            sink.scalars(record.step, values)

    return OutputGradObserver(LayerLog(stats, write, OutputGrads), stats)


def _of_layers(job: Job, logbook: Logbook | None) -> Iterator[LayerObserver]:
    """One, or none: of the stages of a pipeline each has other layers. ``logbook``: of the rank that writes.

    Of ranks with whole copies the first one measures: gradients and updates are those of all, activations its own.
    Where ranks divide the weights all of them measure their parts, in the same steps. A compiled model is not hooked:
    it would be compiled again.
    """
    in_parts = job.divides_weights
    if not job.recipe.log.layers or job.plan.degrees.pipeline > 1 or (logbook is None and not in_parts):
        return
    activations = logbook is not None and not job.recipe.model.compile
    stats = LayerStats(job.state.model, activations=activations, put_together=_summed if in_parts else None)

    def write(record: Layers) -> None:
        if logbook is not None:
            logbook.journal.write(record)
            for sink in logbook.sinks:
                sink.scalars(record.step, scalars_of(record, stats.paths))

    if stats.layers:
        log = LayerLog(stats, write, Layers, in_step=in_parts)
        yield LayerObserver(log) if job.parts.advance is None else OwnStepLayers(log, job.state)


def _summed(squares: Tensor, parameters: Sequence[Tensor]) -> None:
    """Adds up what the ranks have of each parameter, in place: one exchange for each way in which they are divided."""
    ways: dict[object, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if is_divided(parameter):
            ways.setdefault((parameter.device_mesh, parameter.placements), []).append(index)
    for indices in ways.values():
        if len(indices) == len(parameters):  # to take some of the columns costs a host sync
            summed_over_parts(squares, parameters[0])
        else:
            squares[:, indices] = summed_over_parts(squares[:, indices], parameters[indices[0]])
