"""Whether and how the ranks of a run are compared while they train."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Record
from trainwright.training.job import Job
from trainwright.watching.ranks_observer import RanksObserver

OF_TIMEOUT = 0.8
"""After this share of the time that ranks wait for each other one is said to hang: just before they give up."""


def compares_ranks(job: Job) -> bool:
    """Whether the doctor compares the ranks."""
    return job.recipe.log.doctor and job.world.size > 1


def make_ranks_observer(
    job: Job,
    folder: RunFolder,
    write: Callable[[Record], None] = lambda record: None,
    say: Callable[[str], None] = lambda line: None,
) -> RanksObserver | None:
    """The doctor on one rank of several; None where it is not wanted. Every rank must make one, or none."""
    if not compares_ranks(job):
        return None
    degrees = job.mesh.degrees
    return RanksObserver(
        job.state,
        folder,
        are_copies=degrees.replicate == degrees.ranks,
        has_own_samples=job.mesh.data.size == job.world.size,
        patience_s=OF_TIMEOUT * job.recipe.parallel.timeout.value,
        write=write,
        say=say,
    )
