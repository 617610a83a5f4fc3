"""Estimates the remaining wall-clock time of a run: training, evaluations, examinations by the doctor, and saves."""

from __future__ import annotations

from dataclasses import replace

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.run_length import ByTheClock, Until
from trainwright.monitoring.remaining import Measured
from trainwright.plan.run_time import EvaluationCost, predicted_seconds, training_time_s
from trainwright.training.job import ENDING_S, Job, is_watched, until_of
from trainwright.watching.budget import predicted_end_s, predicted_s


def seconds_left(job: Job, measured: Measured, state: TrainState, until: Until, save_s: float | None) -> float:
    """Return the seconds until the command ends, extrapolated from measurements of this run.

    ``save_s`` is the duration of the last save, since another one follows at the end. None: no save yet.
    """
    if isinstance(until, ByTheClock):
        return until.left_s
    plan = replace(job.plan, predicted=replace(job.plan.predicted, step_s=max(measured.step_s, 1e-9)))
    left = predicted_seconds(plan, _evaluation_cost(job, measured), used=until_of(plan)(state))
    steps_left = left["training"] / max(measured.step_s, 1e-9)
    beside_s = steps_left * measured.beside_s + (ENDING_S if save_s is None else save_s)
    examinations_s = _examinations_s(job, measured, steps_left) if is_watched(job) else 0.0
    return sum(left.values()) + beside_s + examinations_s


def _evaluation_cost(job: Job, measured: Measured) -> EvaluationCost | None:
    """Return the cost measured in this run; before its first evaluation that of the dry run."""
    cost, seconds = job.measured.evaluation_cost, measured.evaluation_s
    if seconds is None:
        return cost
    batches = None if cost is None else cost.batches
    return EvaluationCost(seconds / (job.plan.cadence.evaluate_batches or batches or 1), batches or 1)


def _examinations_s(job: Job, measured: Measured, steps_left: float) -> float:
    """Return the seconds for the remaining examinations, within the budget of the full run."""
    total_s = training_time_s(replace(job.plan, predicted=replace(job.plan.predicted, step_s=measured.step_s))) or 0.0
    end_s = predicted_end_s(total_s)
    left_s = max(0.0, predicted_s(total_s) - measured.examined_s)
    return min(left_s, end_s + steps_left * measured.examination_s)
