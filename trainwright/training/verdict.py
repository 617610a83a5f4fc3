"""The verdict on a run of the engine, judged when it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.data import IterableDataset

from trainwright.data.ready_batches import ReadyBatches
from trainwright.engine.loss import measures_progress, takes_model
from trainwright.monitoring.step_log import StepLog
from trainwright.plan.reading import ReadingPace
from trainwright.recipe.catalog import LOSSES
from trainwright.report.pages.log import IncrementalLog
from trainwright.report.verdict import VerdictFacts, evaluations_in, judge
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Ended, Evaluated, Found, Logged, RunVerdict
from trainwright.training.job import Job

MIN_WAIT_FRACTION, MIN_WAIT_S = 0.3, 1e-3
"""Waiting for data is mentioned beyond this fraction of the time, and beyond this mean: a worker takes as long to hand
a batch over."""


def verdict_on(
    job: Job, folder: RunFolder, ended: Ended, log: StepLog, *, findings: Sequence[Found], examined: bool, saved: bool
) -> RunVerdict:
    """Judges a run by its whole log, earlier processes included."""
    course = IncrementalLog(folder.log)
    course.advance()
    return judge(
        VerdictFacts(
            state=ended.ending,
            reason=ended.reason,
            step=ended.step,
            planned_steps=job.plan.extent.steps,
            losses=course.losses,
            is_one_objective=_is_one_objective(job),
            chance=job.plan.expected_loss,
            evaluations=evaluations_in(course.notes(Evaluated, Logged)),
            findings=findings,
            skipped=ended.skipped,
            examined=examined,
            saved=saved,
            troubles=tuple(_troubles(job, log)),
            references=job.marks,
        )
    )


def _is_one_objective(job: Job) -> bool:
    """Whether the training loss compares outputs of the model with samples that stay the same.

    A custom step may train several models against each other. A stream may be made by the model itself, and a loss that
    is given the model may do the same: it may play the episodes of a policy.
    """
    is_stream = isinstance(job.parts.train.dataset, IterableDataset | ReadyBatches)
    compares = job.recipe.loss.use in LOSSES or not takes_model(job.parts.loss)
    compares = compares and measures_progress(job.parts.loss)
    return job.parts.advance is None and not is_stream and compares


def _troubles(job: Job, log: StepLog) -> Iterator[str]:
    if log.wait_share > MIN_WAIT_FRACTION and log.wait_s > MIN_WAIT_S:
        yield f"{log.wait_share:.0%} of the time went into waiting for data ({_reads_faster(job, log)})"


def _reads_faster(job: Job, log: StepLog) -> str:
    """What to do about waiting for data, from what this run measured."""
    if isinstance(job.parts.train.dataset, ReadyBatches):
        return "time a loop over the loader alone, with num_workers=0 and with more"
    return ReadingPace(job.recipe.data.workers, log.wait_s, log.read_s).advice()
