"""Measures a planned run with its first batch: step time, memory, first loss, and the cost of an evaluation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from trainwright.assembly.assemble import build_loading, validation_sets
from trainwright.checkpoint.average import WeightAverage
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.isolation import NotIsolated
from trainwright.checkpoint.shards import locals_of
from trainwright.checkpoint.train_state import TrainState
from trainwright.data.loading import Loading
from trainwright.distributed import SOLO
from trainwright.engine.dry_run import Mode, time_evaluation
from trainwright.engine.guard import MAX_COPIED_TABLE_BYTES
from trainwright.plan.explain import EXAMINATIONS
from trainwright.plan.make import Note, Plan, ResumedValues, RunFacts, choose_precision, with_dry_run
from trainwright.plan.memory import memory_bytes
from trainwright.plan.reading import ReadingPace
from trainwright.plan.run_time import (
    EvaluationCost,
    affordable_batches,
    evaluation_note,
    evaluations,
    predicted_seconds,
    skips_full_evaluation,
    training_time_s,
)
from trainwright.plan.trace.local_device import known_device
from trainwright.plan.trace.peak_pace import peak_samples_s
from trainwright.training.custom_objects import measured_state, memory_note
from trainwright.training.custom_step import without_dry_run
from trainwright.training.first_batch import try_batch
from trainwright.training.job import Job, Measurements, is_watched, until_of
from trainwright.training.layout import PIPELINE_WITHOUT_DRY_RUN, tensor_share
from trainwright.training.rank_agreement import from_first_rank
from trainwright.training.reading import time_workers
from trainwright.watching.budget import predicted_from_start_s

PLAIN_MEAN_NOTE = (
    "the loss returns a plain mean; tw.Loss(total, weight) counts exactly where padding or targets are ignored"
)


class OpenedData(NamedTuple):
    """The training data after their first batch was read.

    Attributes:
        first: The first batch to train on.
        loading: The settings for reading the data.
        start_s: Seconds until the first batch was available.
        read_at_once: Batches that were read in this time.
        reads_in_workers: True if other processes read the batches.
        looks_at_training: True if the loader depends on the training, so that nothing may be read ahead.
    """

    first: StepBatch
    loading: Loading
    start_s: float
    read_at_once: int
    reads_in_workers: bool
    depends_on_training: bool


class DryRunPlan(NamedTuple):
    """The plan after the dry run, and samples per second of all ranks at the peak rate of their devices."""

    plan: Plan
    peak_samples_s: float | None = None


def measure(job: Job, data: OpenedData, facts: RunFacts, kept: ResumedValues, asked: str | None) -> Job:
    """Return the job with the measurements of a dry run of its first batch. Its state is unchanged.

    All ranks that compute together must call it. If ranks compute independently, only the first one measures.

    Args:
        job: The planned job.
        data: The opened training data.
        facts: Facts about model, data and machine that the plan was made from.
        kept: The values that a resumed run keeps from its earlier plan.
        asked: The precision in the recipe; None if it is not set.
    """
    if job.world.rank > 0 and not job.divides_weights:
        return job
    tried = _with_dry_run(job, facts, data.first, asked)
    reading, batches = _reading(job, data, tried.plan)
    timed = _with_times(replace(job, plan=tried.plan), reading, kept)
    if job.state.step:  # the dry run has measured the loss of a model that was trained
        timed = Timed(replace(timed.plan, initial_loss=None), timed.evaluation_cost)
    measured = Measurements(reading, timed.evaluation_cost, tried.peak_samples_s)
    return replace(job, plan=timed.plan, batches=batches, measured=measured)


def _reading(job: Job, data: OpenedData, plan: Plan) -> tuple[ReadingPace, Iterator[StepBatch]]:
    """Return the wait for data per step, and the stream of batches including those read for the measurement."""
    if not data.reads_in_workers:
        return pace_of_first(data), job.batches
    if data.depends_on_training or plan.step_s is None:
        return ReadingPace(), job.batches
    loading = data.loading
    return time_workers(
        job.batches,
        workers=loading.workers,
        prefetch=loading.prefetch,
        compute_s=plan.step_s,
        start_s=data.start_s,
        most=None if loading.loader is None else _left_of_epoch(plan, job.state, loading.batch_size) - 1,
    )


def pace_of_first(data: OpenedData) -> ReadingPace:
    """Return the pace of reading in this process, from the time of the first batch."""
    read_s = data.start_s / data.read_at_once
    return ReadingPace(wait_s=read_s, read_s=read_s, start_s=data.start_s)


def _with_first_batch(job: Job, facts: RunFacts, first: StepBatch, asked: str | None) -> Plan:
    """Return the plan with measurements of the first micro-batch: loss, time per precision and threads, memory."""
    one = replace(first, micro=(copy.deepcopy(first.micro[0]),))  # a model may write into its input
    together = job.world if job.divides_weights else SOLO
    seen = try_batch(job.state, one, job.parts.loss, job.precision_of, facts, asked, together)
    notes = [Note("loss", "weighted by batch size", PLAIN_MEAN_NOTE)] if seen.mean else []
    notes.extend(memory_note(job.recipe, seen.optimizer_bytes))
    degrees, share = job.plan.degrees, tensor_share(job.parts.model, job.plan.degrees)
    average_bytes, buffer_bytes = _average_and_buffers_bytes(job.state)
    return with_dry_run(
        replace(job.plan, notes=(*job.plan.notes, *notes)),
        precision=asked,
        facts=facts,
        loss=seen.loss,
        outputs=seen.outputs,
        seconds={mode: seconds * len(first.micro) + seen.update_s for mode, seconds in seen.seconds.items()},
        thread_s={mode: seconds * len(first.micro) for mode, seconds in seen.thread_s.items()},
        memory_bytes=memory_bytes(
            job.recipe.optimizer.use,
            job.recipe.optimizer.args,
            parameters=round(facts.parameters * share),
            trainable=round(facts.trainable * share),
            activations=seen.activation_bytes,
            average=average_bytes,
            buffers=buffer_bytes,
            inputs=sum(tensor.nbytes for tensor in first.tensors),
            offloaded=job.recipe.optimizer.offload is True and job.device.type != "cpu",
            shard=degrees.shard,
            zero=job.recipe.parallel.zero,
        )
        | measured_state(job.recipe, seen.optimizer_bytes),
    )


def _left_of_epoch(plan: Plan, state: TrainState, batch_size: int) -> int:
    """Return the steps left in this epoch. The order of the next one must not be drawn before its last step."""
    return (plan.steps_per_epoch or 0) - state.data.position // batch_size


def _average_and_buffers_bytes(state: TrainState) -> tuple[int, int]:
    """Return the bytes of averaged weights, and of buffers with the copies that undo a failed step."""
    average = locals_of(state.ema.shadow.values()) if isinstance(state.ema, WeightAverage) else []
    modules = [state.model, *([state.loss] if state.loss is not None else [])]
    sizes = {id(buffer): buffer.nbytes for module in modules for buffer in module.buffers()}.values()
    return sum(each.nbytes for each in average), sum(
        size * (2 if size <= MAX_COPIED_TABLE_BYTES else 1) for size in sizes
    )


def _with_dry_run(job: Job, facts: RunFacts, first: StepBatch, asked: str | None) -> DryRunPlan:
    """Do a dry run of the first batch. ``step_s`` of the returned plan is the time of a step without its data."""
    if job.parts.advance is not None:
        return DryRunPlan(without_dry_run(job.plan, job.recipe))
    if job.stages is not None:
        return DryRunPlan(_without_dry_run(job.plan, facts, asked, PIPELINE_WITHOUT_DRY_RUN))
    together = job.world if job.divides_weights else SOLO
    tried, why = job.plan, ""
    try:
        tried = _with_first_batch(job, facts, first, asked)
    except NotIsolated as error:
        why = f"the dry run would leave a trace: {error}"
    if not together.least(int(not why)):
        none = f"{why or 'another rank makes none'}; no times, no first loss"
        return DryRunPlan(_without_dry_run(job.plan, facts, asked, Note("dry run", "none", none)))
    plan = from_first_rank(together, tried)  # the times of ranks that compute together differ
    if job.divides_weights:
        return DryRunPlan(plan)
    pace = peak_samples_s(job.parts, first.micro[0], known_device(job.device), plan.precision)
    return DryRunPlan(plan, pace and pace * job.world.size)


def _without_dry_run(plan: Plan, facts: RunFacts, asked: str | None, why: Note) -> Plan:
    chosen, note = choose_precision(asked, facts.device, facts.low_precision, {})
    return replace(plan, precision=chosen, notes=(*plan.notes, note, why))


class Timed(NamedTuple):
    """A plan with times, and the cost of an evaluation."""

    plan: Plan
    evaluation_cost: EvaluationCost | None = None


def _with_times(job: Job, reading: ReadingPace, kept: ResumedValues) -> Timed:
    """Return the plan with the predicted time of the run and the size of its evaluations."""
    plan = job.plan
    if plan.step_s is None:
        return Timed(plan)
    notes = (*plan.notes, *reading.notes())
    paced = replace(plan, step_s=plan.step_s + reading.wait_s, wait_s=reading.wait_s, notes=notes)
    cost = _evaluation_cost(paced, job)
    evaluated = _with_evaluations(paced, job, cost, kept)
    seconds = {
        **predicted_seconds(evaluated, cost, used=until_of(evaluated)(job.state)),
        **_examination_seconds(evaluated, job),
    }
    return Timed(replace(evaluated, seconds=seconds), cost)


def _with_evaluations(plan: Plan, job: Job, cost: EvaluationCost | None, kept: ResumedValues) -> Plan:
    """Return the plan with the affordable number of batches for each evaluation during training."""
    if cost is None or job.recipe.evaluation.batches is not None or kept.evaluate_batches is not None:
        return plan
    within_s = job.loaded.within_s
    limited = replace(plan, evaluate_batches=affordable_batches(plan, cost, within_s))
    whole = plan.evaluates_whole and not (within_s is not None and skips_full_evaluation(limited, cost, within_s))
    decided = replace(limited, evaluates_whole=whole)
    notes = [evaluation_note(decided, cost)] if decided.evaluate_batches else []
    return replace(decided, notes=(*plan.notes, *notes))


def _evaluation_cost(plan: Plan, job: Job) -> EvaluationCost | None:
    loading = build_loading(job.parts, job.recipe, plan, job.device, world=job.mesh.data)
    sets = validation_sets(job.parts, job.recipe, loading)
    batches = next(iter(sets.values()), None)
    if batches is None or (batches.count is None and evaluations(plan) <= 1):  # a stream may be readable only once
        return None
    mode = Mode(job.precision_of(plan.precision), plan.threads)
    together = job.world if job.divides_weights else SOLO
    try:
        batch_s = time_evaluation(job.state, batches, job.parts.loss, mode, together, job.built.metrics) or 0.0
    except NotIsolated:
        return None
    return EvaluationCost(batch_s * (len(sets) + isinstance(job.state.ema, WeightAverage)), batches.count)


def _examination_seconds(plan: Plan, job: Job) -> dict[str, float]:
    training_s = training_time_s(plan)
    if not is_watched(job) or not training_s or job.recipe.log.examine == "all":
        return {}
    return {EXAMINATIONS: predicted_from_start_s(training_s * (1 - until_of(plan)(job.state)))}
