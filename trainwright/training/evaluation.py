"""The evaluation of a run, and when it is due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainwright.build.assemble import build_loading, validation_batches
from trainwright.build.stepped_schedule import SteppedSchedule
from trainwright.engine.evaluate import EvaluationResult
from trainwright.observe.cadence import Every
from trainwright.observe.evaluation import EvaluationListener, PeriodicEvaluation, ValidationSet
from trainwright.plan.duration import Interval
from trainwright.state.train_state import TrainState
from trainwright.training.job import Job
from trainwright.training.layout import evaluation_loss


def periodic_evaluation(job: Job, listeners: Sequence[EvaluationListener] = ()) -> PeriodicEvaluation | None:
    """Returns the evaluation that a plan asks for; None without a validation set."""
    world = job.mesh.data
    loading = build_loading(job.parts, job.recipe, job.plan, job.device, world=world)
    rows = job.recipe.evaluation.batch or loading.micro_size
    whole = validation_batches(job.parts, job.recipe, loading)
    if whole is None:
        return None
    count = job.plan.evaluate_batches
    part = whole.part(count) if count and not job.recipe.evaluation.batches else whole
    return PeriodicEvaluation(
        ValidationSet(part, whole if job.plan.evaluates_whole else part, count),
        evaluation_loss(job.parts.loss, job.mesh, job.staged(rows)),
        every(job.plan.evaluate_every, job.state),
        precision=job.precision,
        listeners=[*listeners, *_schedules(job)],
        world=job.mesh.sums,
    )


def _schedules(job: Job) -> Iterator[EvaluationListener]:
    if isinstance(job.built.schedule, SteppedSchedule) and job.built.schedule.needs_evaluation:
        yield _ByMetric(job.built.schedule, job.recipe.checkpoint.best or "loss", job.plan.evaluate_batches)


class _ByMetric(NamedTuple):
    """Tells a schedule each value of a metric, as it is in the course of the run: of so many batches."""

    schedule: SteppedSchedule
    metric: str
    batches: int

    def evaluated(self, step: int, seen: EvaluationResult) -> None:
        if seen.batches == self.batches:
            self.schedule.evaluated(step, seen.figure(self.metric))


def every(interval: Interval, since: TrainState) -> Every:
    return Every(steps=interval.steps, seconds=interval.seconds, fraction=interval.fraction, since=since)
