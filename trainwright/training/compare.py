"""Makes the observer that compares the ranks of a run during training."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Record
from trainwright.training.job import Job
from trainwright.watching.ranks_observer import RanksObserver

HANG_TIMEOUT_FRACTION = 0.8
"""Fraction of the collective timeout after which a rank is reported as hanging, so the report precedes the timeout."""


def compares_ranks(job: Job) -> bool:
    """Return True if the doctor compares the ranks of this job."""
    return job.recipe.log.doctor and job.world.size > 1


def make_ranks_observer(
    job: Job,
    folder: RunFolder,
    write: Callable[[Record], None] = lambda record: None,
    say: Callable[[str], None] = lambda line: None,
) -> RanksObserver | None:
    """Return the doctor's observer for one of several ranks; None if the ranks are not compared.

    The result depends on the recipe and the number of ranks only, so all ranks make an observer, or none does.
    """
    if not compares_ranks(job):
        return None
    degrees = job.mesh.degrees
    return RanksObserver(
        job.state,
        folder,
        are_copies=degrees.replicate == degrees.ranks,
        has_own_samples=job.mesh.data.size == job.world.size,
        patience_s=HANG_TIMEOUT_FRACTION * job.recipe.parallel.timeout.value,
        write=write,
        say=say,
    )
