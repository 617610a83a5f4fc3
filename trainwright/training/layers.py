"""Whether a run has statistics by layer, and what makes them."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.observe.layer_stats import LayerLog, LayerObserver, LayerStats, scalars_of
from trainwright.observe.logbook import Logbook
from trainwright.runlog.records import Layers
from trainwright.training.job import Job


def layer_observers(job: Job, logbook: Logbook) -> Iterator[LayerObserver]:
    """One, or none: ranks that divide a layer would have to put it together; a step of the user's own tells nothing.

    Of ranks with whole copies the first one measures: gradients and updates are those of all, activations its own. A
    compiled model is not hooked: it would be compiled again.
    """
    if not job.recipe.log.layers or job.divides_weights or job.parts.advance is not None:
        return
    stats = LayerStats(job.parts.model, activations=not job.recipe.model.compile)

    def write(record: Layers) -> None:
        logbook.journal.write(record)
        for sink in logbook.sinks:
            sink.scalars(record.step, scalars_of(record, [layer.path for layer in stats.layers]))

    if stats.layers:
        yield LayerObserver(LayerLog(stats, write))
