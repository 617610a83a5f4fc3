"""Completes averaged weights at the end of a run by measuring their BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from trainwright.checkpoint.average import Swa
from trainwright.engine.average_norms import measure_norms_of
from trainwright.training.job import Job


def measure_norms(job: Job, say: Callable[[str], None] = lambda line: None) -> None:
    """Measure the BatchNorm statistics of the SWA average on the training batches that would come next."""
    average, ask = job.state.ema, job.recipe.model.swa
    if ask is None or not isinstance(average, Swa) or not average.num_updates or average.is_complete:
        return
    batches = islice(job.batches, ask.norm_batches or job.plan.steps_per_epoch)
    measured = measure_norms_of(
        average, job.state, job.parts.loss, batches, precision=job.precision, world=job.mesh.sums
    )
    if not measured:
        say("the training data are used up: BatchNorm statistics of the average are those of the trained weights")
