"""How long a run still takes by the clock: training, evaluations, examinations of the doctor and saves."""

from __future__ import annotations

import time
from dataclasses import replace

from trainwright.observe.remaining import Measured
from trainwright.plan.run_time import EvaluationCost, foretold, training_time_s
from trainwright.state.train_state import TrainState
from trainwright.training.job import ENDING_S, Job, is_watched, last_examination_s, until_of
from trainwright.watching.look_schedule import looks_s


def left_over(job: Job, measured: Measured, state: TrainState, save_s: float | None) -> float:
    """Seconds until the whole command is over, extrapolated from what was measured in this run.

    ``save_s`` is what the last save took: another one follows at the end. None: there was none yet.
    """
    if job.loaded.end_s is not None:
        return max(0.0, job.loaded.end_s - time.perf_counter())
    plan = replace(job.plan, step_s=max(measured.step_s, 1e-9))
    left = foretold(plan, _evaluation_cost(job, measured), used=until_of(plan)(state))
    steps_left = left["training"] / max(measured.step_s, 1e-9)
    beside_s = steps_left * measured.beside_s + (ENDING_S if save_s is None else save_s)
    examinations_s = _examinations_s(job, measured, steps_left) if is_watched(job) else 0.0
    return sum(left.values()) + beside_s + examinations_s


def _evaluation_cost(job: Job, measured: Measured) -> EvaluationCost | None:
    """As measured in this run; before the first evaluation as in the dry run."""
    cost, seconds = job.evaluation_cost, measured.evaluation_s
    if seconds is None:
        return cost
    batches = None if cost is None else cost.batches
    return EvaluationCost(seconds / (job.plan.evaluate_batches or batches or 1), batches or 1)


def _examinations_s(job: Job, measured: Measured, steps_left: float) -> float:
    """The examination at the end, and those before it: at the pace of this run, within what is kept for them."""
    plan = replace(job.plan, step_s=measured.step_s)
    total_s, last_s = training_time_s(plan) or 0.0, last_examination_s(plan)
    num_steps, in_seconds = total_s / max(measured.step_s, 1e-9), plan.extent.seconds is not None
    kept_s = looks_s(measured.step_s, num_steps, total_s, in_seconds=in_seconds) - last_s - measured.examined_s
    return last_s + min(steps_left * measured.examination_s, max(0.0, kept_s))
