"""Builds the periodic evaluation of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainwright.assembly.assemble import build_loading, validation_sets
from trainwright.checkpoint.train_state import TrainState
from trainwright.data.loading import EvaluationBatches
from trainwright.data.unwrap import Unwrapped
from trainwright.engine.evaluate import EvaluationResult
from trainwright.monitoring.cadence import Every
from trainwright.monitoring.evaluation import EvaluationListener, PeriodicEvaluation, ValidationSet
from trainwright.optim.stepped_schedule import SteppedSchedule
from trainwright.plan.duration import Interval
from trainwright.recorder.engine_source import EngineLoader, ReportedBatches
from trainwright.training.job import Job
from trainwright.training.layout import evaluation_loss


def periodic_evaluation(
    job: Job, listeners: Sequence[EvaluationListener] = (), *, is_reported: bool = False
) -> PeriodicEvaluation | None:
    """Return the evaluation that the plan schedules; None without a validation set.

    With ``is_reported``, the recorder receives the batches as if they came from a DataLoader.
    """
    world = job.mesh.data
    loading = build_loading(job.parts, job.recipe, job.plan, job.device, world=world)
    rows = job.recipe.evaluation.batch or loading.micro_size
    whole_sets = validation_sets(job.parts, job.recipe.evaluation, loading)
    sets = {name: _in_course(job, whole) for name, whole in whole_sets.items()}
    if not sets:
        return None
    if is_reported:
        sets = {name: _reported(each, job.parts.val_sets[name]) for name, each in sets.items()}
    return PeriodicEvaluation(
        sets,
        evaluation_loss(job.parts.loss, job.mesh, job.staged(rows)),
        every(job.plan.cadence.evaluate_every, job.state),
        precision=job.precision,
        listeners=[*listeners, *_schedules(job)],
        world=job.mesh.sums,
        metrics=job.built.metrics,
    )


def _in_course(job: Job, whole: EvaluationBatches) -> ValidationSet:
    count = job.plan.cadence.evaluate_batches
    part = whole.part(count) if count and not job.recipe.evaluation.batches else whole
    return ValidationSet(part, whole if job.plan.cadence.evaluates_whole else part, count)


def _reported(each: ValidationSet, source: Unwrapped | None) -> ValidationSet:
    """Wrap both batch sequences of a validation set in one loader object."""
    loader = EngineLoader(None if source is None else source.origin)
    return ValidationSet(ReportedBatches(loader, each.in_course), ReportedBatches(loader, each.at_end), each.count)


def _schedules(job: Job) -> Iterator[EvaluationListener]:
    if isinstance(job.built.schedule, SteppedSchedule) and job.built.schedule.needs_evaluation:
        yield _ByMetric(job.built.schedule, job.recipe.checkpoint.best or "loss", job.plan.cadence.evaluate_batches)


class _ByMetric(NamedTuple):
    """Reports a validation metric to a schedule, from evaluations over ``batches`` batches only.

    An evaluation of the full set at the end of a run has another number of batches and is ignored.
    """

    schedule: SteppedSchedule
    metric: str
    batches: int

    def evaluated(self, step: int, seen: EvaluationResult) -> None:
        if seen.batches == self.batches:
            self.schedule.evaluated(step, seen.figure(self.metric))


def every(interval: Interval, since: TrainState) -> Every:
    return Every(steps=interval.steps, seconds=interval.seconds, fraction=interval.fraction, since=since)
