"""The end of a run that averages its weights: BatchNorm statistics of the average."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from trainwright.checkpoint.average import Swa
from trainwright.engine.average_norms import measure_norms_of
from trainwright.training.job import Job


def measure_norms(job: Job, say: Callable[[str], None] = lambda line: None) -> None:
    """Measures BatchNorm statistics with the average of a run, on the training batches that would follow."""
    average, ask = job.state.ema, job.recipe.model.swa
    if ask is None or not isinstance(average, Swa) or not average.num_updates or average.is_complete:
        return
    batches = islice(job.batches, ask.norm_batches or job.plan.steps_per_epoch)
    measured = measure_norms_of(
        average, job.state, job.parts.loss, batches, precision=job.precision, world=job.mesh.sums
    )
    if not measured:
        say("the training data are used up: BatchNorm statistics of the average are those of the trained weights")
