"""Predicts the wall-clock time of a run from the dry run's timings, and limits the time of evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.plan.amounts import human_seconds
from trainwright.plan.make import Note, Plan

EVALUATION_FRACTION = 0.1
"""The fraction of training time that all evaluations during a run may take together."""
LAST_EVALUATION = "evaluation at the end"
DEADLINE_EVALUATION_FRACTION, DEADLINE_FULL_EVALUATION_FRACTION = 0.015, 0.01
"""For a run with a deadline: the fraction for evaluations during the run, and for the full set at its end."""
MIN_EVALUATION_BUDGET_S = 1.0
"""Seconds that all evaluations together may take, even if this is more than their fraction."""
MIN_EVALUATION_BUDGET_OF_STEPS_S = 3.0
"""The same for a run with a fixed number of steps, whose evaluations should not depend on the load of the machine."""


@dataclass(frozen=True)
class EvaluationCost:
    """Seconds per batch, and the ``batches`` of the last evaluation of a run; None for a stream of unknown length."""

    batch_s: float
    batches: int | None


def affordable_batches(plan: Plan, cost: EvaluationCost, within_s: float | None = None) -> int:
    """Return the batches per evaluation with which all evaluations during the run fit their budget; 0: the full set.

    ``within_s`` is the deadline of the run in seconds, if there is one. The result is a half, a quarter, an eighth, ...
    of the set, so that two starts of a recipe choose the same number although their timings differ.
    """
    training_s, count = training_time_s(plan), evaluations(plan)
    if training_s is None or count <= 1:
        return 0
    free_s = MIN_EVALUATION_BUDGET_S if plan.extent.steps is None else MIN_EVALUATION_BUDGET_OF_STEPS_S
    together_s = (
        max(EVALUATION_FRACTION * training_s, free_s) if within_s is None else DEADLINE_EVALUATION_FRACTION * within_s
    )
    allowed = max(1.0, together_s / count / max(cost.batch_s, 1e-9))
    if cost.batches is None:
        return 1 << math.floor(math.log2(allowed))
    if cost.batches <= allowed:
        return 0
    return math.ceil(cost.batches / (1 << math.ceil(math.log2(cost.batches / math.floor(allowed)))))


def skips_full_evaluation(plan: Plan, cost: EvaluationCost, within_s: float) -> bool:
    """Return True if the full set at the end would take more than its fraction of the run."""
    return (
        bool(plan.cadence.evaluate_batches)
        and cost.batch_s * (cost.batches or 0) > DEADLINE_FULL_EVALUATION_FRACTION * within_s
    )


def evaluation_note(plan: Plan, cost: EvaluationCost) -> Note:
    """Return the note that explains why only a part of the validation set is evaluated during the run."""
    of = f" of {cost.batches}" if cost.batches else ""
    whole_s = (
        f", the full set would take {human_seconds(cost.batch_s * cost.batches)} each time" if cost.batches else ""
    )
    at_end = "; the full set at the end" if plan.cadence.evaluates_whole else ""
    why = f"always the same ones{whole_s}{at_end}"
    return Note("evaluation", f"{plan.cadence.evaluate_batches}{of} batches", why)


def evaluations(plan: Plan) -> float:
    """Return the number of evaluations in the run; 0 if it cannot be known before a step was timed."""
    training_s, every = training_time_s(plan), plan.cadence.evaluate_every
    if every.fraction is not None:
        return 1 / every.fraction
    if every.steps is not None and plan.extent.steps is not None:
        return plan.extent.steps / every.steps
    every_s = every.seconds if every.steps is None else every.steps * (plan.predicted.step_s or 0.0)
    return training_s / every_s if training_s and every_s else 0.0


def training_time_s(plan: Plan) -> float | None:
    """Return the seconds of training of the complete run, or None if no step was timed."""
    if plan.extent.seconds is not None:
        return plan.extent.seconds
    return None if plan.predicted.step_s is None else plan.predicted.step_s * (plan.extent.steps or 0)


def predicted_seconds(plan: Plan, cost: EvaluationCost | None, *, used: float) -> Mapping[str, float]:
    """Return the remaining wall-clock seconds of a run by activity; ``used`` is the fraction that is done.

    Empty if no step was timed.
    """
    training_s = training_time_s(plan)
    if training_s is None:
        return {}
    seconds = {"training": training_s * (1 - used)}
    if cost is not None:
        whole = cost.batches or plan.cadence.evaluate_batches
        each, count = plan.cadence.evaluate_batches or whole, evaluations(plan)
        before_the_end = max(0, math.ceil(count - 1e-9) - 1 - math.floor(count * used + 1e-9))
        seconds["evaluation"] = cost.batch_s * each * before_the_end
        seconds[LAST_EVALUATION] = cost.batch_s * (
            each if each == whole or not plan.cadence.evaluates_whole else each + whole
        )
    return seconds


WORKERS_SLOWER_RATIO = 0.8
"""Reading time / waiting time. Below this ratio, reading without workers is clearly faster than waiting for them."""


@dataclass(frozen=True)
class ReadingPace:
    """Seconds per step spent on data, averaged over ``steps`` steps.

    ``wait_s`` is the time that a step waits for its batch. ``read_s`` is the reading time summed over the reading
    processes, which is about what the training process alone would need. ``start_s`` is the time until the first batch.
    """

    workers: int = 0
    wait_s: float = 0.0
    read_s: float = 0.0
    start_s: float = 0.0
    steps: int = 0

    @property
    def workers_cost_more(self) -> bool:
        """True if a step waits longer for the workers than the training process would need to read."""
        return self.workers > 0 and 0.0 < self.read_s < WORKERS_SLOWER_RATIO * self.wait_s

    def advice(self) -> str:
        """Return advice for steps that wait too long. Only measured settings are recommended."""
        if self.workers_cost_more:
            times = f"reading a batch takes {human_seconds(self.read_s)}, its transfer from a worker the rest"
            return f"data.workers: 0 ({times})"
        return "`trainwright profile` measures whether more or fewer data.workers help"

    def notes(self) -> tuple[Note, ...]:
        """Return the measurement of the workers, for the plan."""
        if not self.workers or not self.steps:
            return ()
        seen = (
            f"a step waits {human_seconds(self.wait_s)} for its batch, which takes {human_seconds(self.read_s)} to read"
        )
        seen += f"; the first one came after {human_seconds(self.start_s)}"
        faster = "; data.workers: 0 is faster" if self.workers_cost_more else ""
        return (Note("workers", str(self.workers), f"measured in the dry run: {seen}{faster}"),)
