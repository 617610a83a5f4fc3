"""Makes the observers that record statistics by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from trainwright.assembly.retain_grad import retained_modules
from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.shards import is_divided
from trainwright.checkpoint.train_state import TrainState
from trainwright.monitoring.layer_stats import (
    LayerLog,
    LayerObserver,
    LayerStats,
    OutputGradObserver,
    OutputGradStats,
    scalars_of,
)
from trainwright.monitoring.logbook import Logbook
from trainwright.optim.clip import summed_over_parts
from trainwright.runs.records import Layers, OutputGrads
from trainwright.training.job import Job


class CustomStepLayers(LayerObserver):
    """Records statistics by layer for a custom step, which calls the optimizers itself in any order.

    Parameters of an optimizer that computes gradients in ``step(closure)``, such as LBFGS, are not measured: they have
    no gradients before the update.
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
    """Yield the observers of statistics by layer and of output gradients by module.

    ``logbook`` is None on a rank that writes nothing.
    """
    yield from _layer_observers(job, logbook)
    modules = retained_modules(job.state.model, job.recipe.log.retain_grad)
    if modules and logbook is not None:
        yield _output_grad_observer(OutputGradStats(modules), logbook)


def _output_grad_observer(stats: OutputGradStats, logbook: Logbook) -> OutputGradObserver:
    def write(record: OutputGrads) -> None:
        logbook.journal.write(record)
        values = {f"output_grad_norm/{path}": each for path, each in zip(stats.paths, record.norm) if each == each}
        for sink in logbook.sinks:
            sink.scalars(record.step, values)

    return OutputGradObserver(LayerLog(stats, write, OutputGrads), stats)


def _layer_observers(job: Job, logbook: Logbook | None) -> Iterator[LayerObserver]:
    """Yield the observer of statistics by layer, or nothing for a pipeline, whose stages have different layers.

    If ranks have full copies, only the first rank measures. Its gradients and updates are those of all ranks, its
    activations those of its own samples. If ranks divide the weights, all of them measure their parts in the same
    steps. A compiled model is not hooked, because that would compile it again.
    """
    in_parts = job.divides_weights
    if not job.recipe.log.layers or job.plan.degrees.pipeline > 1 or (logbook is None and not in_parts):
        return
    activations = logbook is not None and not job.recipe.model.compile
    stats = LayerStats(job.state.model, activations=activations, combine_shards=_summed if in_parts else None)

    def write(record: Layers) -> None:
        if logbook is not None:
            logbook.journal.write(record)
            for sink in logbook.sinks:
                sink.scalars(record.step, scalars_of(record, stats.paths))

    if stats.layers:
        log = LayerLog(stats, write, Layers, in_step=in_parts)
        yield LayerObserver(log) if job.parts.custom.advance is None else CustomStepLayers(log, job.state)


def _summed(squares: Tensor, parameters: Sequence[Tensor]) -> None:
    """Add up the squares of all shards of each parameter, in place. Needs one exchange per distinct sharding."""
    shardings: dict[object, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if is_divided(parameter):
            shardings.setdefault((parameter.device_mesh, parameter.placements), []).append(index)
    for indices in shardings.values():
        if len(indices) == len(parameters):  # indexing columns costs a host sync
            summed_over_parts(squares, parameters[0])
        else:
            squares[:, indices] = summed_over_parts(squares[:, indices], parameters[indices[0]])
