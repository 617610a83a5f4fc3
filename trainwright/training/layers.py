"""Whether a run has statistics by layer, and what makes them."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.observe.layer_stats import LayerLog, LayerStats
from trainwright.observe.logbook import Logbook
from trainwright.training.job import Job


def layer_logs(job: Job, logbook: Logbook) -> Iterator[LayerLog]:
    """One, or none: ranks that divide a layer would have to put it together; a step of the user's own tells nothing.

    A compiled model is not hooked: it would be compiled again.
    """
    if job.recipe.log.layers and job.world.size == 1 and job.parts.advance is None:
        stats = LayerStats(job.parts.model, activations=not job.recipe.model.compile)
        if stats.layers:
            yield LayerLog(stats, logbook.journal, logbook.sinks)
