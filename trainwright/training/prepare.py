"""Prepares a run: from a recipe to a Job, which holds everything before the first step. Nothing is trained here.

``prepare`` goes through these stages. Each is a function that makes a new value from the values of earlier stages:

    find_hardware    the machine and the device of this rank
    decide           the recipe with all open settings decided
    make_parts       model, data sets and loss
    plan_run         the plan, by arithmetic
    divide           the part of the model on this rank
    make_state       optimizer, schedule and state; in a resumed run loaded from the checkpoint
    try_out          the stream of batches, and the plan with measurements of a dry run of the first batch
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright.assembly.assemble import (
    Parts,
    at_recipe,
    build_loading,
    build_parts,
    gather_facts,
    training_batches,
    validation_sets,
)
from trainwright.assembly.assemble import prepare as prepare_parts
from trainwright.checkpoint.average import WeightAverage
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.isolation import NotIsolated
from trainwright.checkpoint.rng import seed_all, set_deterministic
from trainwright.checkpoint.shards import locals_of
from trainwright.checkpoint.spikes import SpikeDetector
from trainwright.checkpoint.train_state import TrainState
from trainwright.data.loading import Loading, StepBatches
from trainwright.data.unwrap import with_epoch_counted
from trainwright.distributed import ALONE, SOLO, Launch, RankMesh, World, choose_device, make_mesh, usable_threads
from trainwright.distributed.group import from_first_rank
from trainwright.distributed.memory import adapt_to_limits, free_bytes, retain_blocks, rlimits
from trainwright.engine.dry_run import Mode, time_evaluation
from trainwright.engine.guard import MAX_COPIED_TABLE_BYTES
from trainwright.engine.precision import MatmulMode, Precision
from trainwright.engine.stage_passes import PipelineStages
from trainwright.errors import DataError, UsageError
from trainwright.finetune.grpo import GRPO
from trainwright.finetune.isolation import require_isolated
from trainwright.finetune.losses import fill
from trainwright.monitoring.nvml import Gpus
from trainwright.monitoring.sinks import sink_factories
from trainwright.plan.devices import Device
from trainwright.plan.explain import EXAMINATIONS
from trainwright.plan.machine import read_machine
from trainwright.plan.make import Note, Plan, ResumedValues, RunFacts, choose_precision, make_plan, with_dry_run
from trainwright.plan.memory import memory_bytes, room_for_logits
from trainwright.plan.parallel import solve_layout
from trainwright.plan.run_time import (
    EvaluationCost,
    ReadingPace,
    affordable_batches,
    evaluation_note,
    evaluations,
    predicted_seconds,
    skips_full_evaluation,
    training_time_s,
)
from trainwright.plan.trace.local_device import known_device, local_device, nominal_cpu, peak_samples_s
from trainwright.plan.trace.resolve import Resolved, has_open_settings, is_for, read_resolved, resolve
from trainwright.recipe import Duration, Loaded, Recipe
from trainwright.recipe.duration import BUDGETS
from trainwright.recipe.resolve import is_live, parameters_of
from trainwright.runs.reader import UNUSED, Usage
from trainwright.training.budget import within_budget
from trainwright.training.custom_objects import Live, build_live, memory_note, without_dry_run
from trainwright.training.first_batch import time_workers, try_batch
from trainwright.training.header import run_header
from trainwright.training.job import Hardware, Job, Measurements, is_watched, until_of
from trainwright.training.layout import PIPELINE_WITHOUT_DRY_RUN, lay_out, tensor_share
from trainwright.training.problems import all_problems_reported
from trainwright.training.resume import Earlier, doubled_length
from trainwright.training.run_metadata import describe_origin, notes_of_data
from trainwright.training.supervision import audit_parts, require_labels_in_range, require_supervised
from trainwright.watching.budget import predicted_from_start_s

MIN_MEMORY_HEADROOM_RATIO = 16
"""Free memory / planned memory above which a fragmented heap is assumed not to reach a memory limit."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The arguments of ``prepare`` besides the recipe."""

    parts: Parts | None
    earlier: Earlier | None
    world: World
    launch: Launch
    say: Say


@dataclass(frozen=True)
class Planned:
    """A plan made by arithmetic, and its inputs: facts, and values that a resumed run keeps from its earlier plan."""

    plan: Plan
    facts: RunFacts
    kept: ResumedValues


@dataclass(frozen=True)
class Divided:
    """The part of the model on this rank. ``loss_module`` is the original loss if it is a module."""

    parts: Parts
    plan: Plan
    mesh: RankMesh
    stages: PipelineStages | None
    loss_module: nn.Module | None


@dataclass(frozen=True)
class MadeRun:
    """The live objects of a run. ``requested_precision`` is from the recipe, or from the earlier part of the run."""

    live: Live
    parts: Parts
    provenance: dict[str, Any]
    requested_precision: str | None
    accepted: list[str]


def prepare(
    loaded: Loaded,
    parts: Parts | None = None,
    *,
    earlier: Earlier | None = None,
    world: World = SOLO,
    launch: Launch = ALONE,
    say: Say = lambda _line: None,
) -> Job:
    """Build and plan a run and do a dry run. Nothing is trained. Seeds or restores the random generators.

    With several ranks, the first rank makes the plan and all decisions. The dry run takes the batch of the first step,
    because a stream can be read only once. Measurements and choices of an ``earlier`` part of the run are kept, because
    other ones would change the last bits of the results.

    Args:
        loaded: The recipe.
        parts: Live objects that replace the objects named by the recipe.
        earlier: The earlier part of a resumed run.
        world: All ranks.
        launch: How torchrun or Ray Train started this process.
        say: Receives messages about the data, also later during training.

    Raises:
        RecipeError: With all problems of the recipe.
    """
    request = Request(parts, earlier, world, launch, say)
    with all_problems_reported(loaded, parts, world.size):
        hardware = find_hardware(loaded, request)
        loaded = _within_budget(loaded, hardware, world.size, earlier)
        resolved = decide(loaded, request, hardware)
        whole = make_parts(resolved, request, hardware)
        planned = plan_run(resolved, whole, request, hardware)
        divided = divide(resolved, whole, planned, request, hardware)
        made = make_state(resolved.loaded, divided, planned.facts, request, hardware)
        return try_out(resolved.loaded, divided, made, planned, request, hardware)


def _within_budget(loaded: Loaded, hardware: Hardware, ranks: int, earlier: Earlier | None) -> Loaded:
    if loaded.recipe.until.unit not in BUDGETS:
        return loaded
    gpus = Gpus(hardware.gpu_indices())
    try:
        watts = gpus.power_limit_watts() if gpus.measures_energy else None
    finally:
        gpus.close()
    known = known_device(hardware.device)
    used = earlier.used if earlier else UNUSED
    return within_budget(loaded, None if known is None else known.price, watts, ranks, used)


def _used_before(loaded: Loaded, request: Request, hardware: Hardware) -> Usage:
    """Return time and energy of earlier processes of the run; UNUSED if its cost is unknown, and on all ranks but 0."""
    has_cost = loaded.recipe.price or known_device(hardware.device) or hardware.gpu_indices()
    return request.earlier.used if request.earlier and not request.world.rank and has_cost else UNUSED


def find_hardware(loaded: Loaded, request: Request) -> Hardware:
    """Return the machine, the device of this rank, and its memory. Adapts memory and kernels of the process to them."""
    machine = read_machine()
    adapt_to_limits()
    with at_recipe(loaded.source, "device"):
        device = choose_device(loaded.recipe.device, request.launch.local_rank)
    if device.type == "cpu" and not rlimits():
        retain_blocks()
    if loaded.recipe.deterministic:
        set_deterministic()
    share = nominal_cpu(machine).of_ranks(request.world.size) if device.type == "cpu" else None
    return Hardware(machine, device, share or local_device(probe=False))


def decide(loaded: Loaded, request: Request, hardware: Hardware) -> Resolved:
    """Return the recipe with all open settings decided by the first rank, or in the earlier part of the run."""
    earlier, ranks = request.earlier, request.world.size
    if not has_open_settings(loaded.recipe, ranks):
        resolved = Resolved(loaded)
    elif earlier and (kept := earlier.resolved) and is_for(kept, loaded.recipe, ranks):
        resolved = read_resolved(loaded, kept)
    else:
        with at_recipe(loaded.source, "model"):
            resolved = resolve(loaded, hardware.memory, parts=request.parts, ranks=ranks)
    return from_first_rank(request.world, resolved)


def make_parts(resolved: Resolved, request: Request, hardware: Hardware) -> Parts:
    """Return model, data sets and loss: the passed objects, or the objects named by the recipe."""
    if request.parts is None:
        return build_parts(resolved.loaded, hardware.device, resolved.planned)
    if request.parts.prepared:
        return request.parts
    return prepare_parts(request.parts, resolved.loaded, hardware.device, resolved.planned)


def plan_run(resolved: Resolved, parts: Parts, request: Request, hardware: Hardware) -> Planned:
    """Return the plan of the first rank, made by arithmetic."""
    loaded = resolved.loaded
    recipe = resolved.loaded.recipe
    earlier = request.earlier
    ranks = request.world.size
    quarantine = frozenset(recipe.data.quarantine)
    found = gather_facts(parts, hardware.device, hardware.machine, _threads(recipe, earlier, hardware), quarantine)
    with at_recipe(loaded.source, ""):
        facts = with_epoch_counted(found, parts.train, _in_epochs(recipe), recipe.seed, request.say)
        kept = earlier.kept_from_plan(recipe, facts, solve_layout(recipe, ranks).data) if earlier else ResumedValues()
        plan = from_first_rank(request.world, make_plan(recipe, facts, ranks=ranks, kept=kept))
    return Planned(plan, facts, kept)


def _in_epochs(recipe: Recipe) -> str:
    """Return the recipe path of the first length or interval that is given in epochs; "" if there is none."""
    lengths: dict[str, Duration | None] = {
        "until": recipe.until,
        "schedule.warmup": recipe.schedule.warmup,
        "evaluation.every": recipe.evaluation.every,
        "checkpoint.every": recipe.checkpoint.every,
        "checkpoint.keep_every": recipe.checkpoint.keep_every,
        "log.every": recipe.log.every,
    }
    return next((path for path, length in lengths.items() if length is not None and length.unit == "ep"), "")


def _threads(recipe: Recipe, earlier: Earlier | None, hardware: Hardware) -> tuple[int, ...]:
    if earlier:
        return (earlier.threads,)
    return (1,) if recipe.parallel.exact else usable_threads(hardware.device)


def divide(resolved: Resolved, parts: Parts, planned: Planned, request: Request, hardware: Hardware) -> Divided:
    """Divide the model among the ranks, in place, and return the part of this rank."""
    mesh = make_mesh(planned.plan.degrees, request.world, hardware.device)
    copy_first_weights(parts.model, parts.loss, request.world)
    laid_out = lay_out(parts, resolved.loaded, mesh, hardware.device)
    logits = from_first_rank(
        request.world, _logits_limit(laid_out.parts, resolved, planned.facts, hardware.memory, request.earlier)
    )
    settled, notes = {**resolved.to_json(), **logits}, (*resolved.notes, *planned.plan.notes, *laid_out.notes)
    plan = replace(planned.plan, settled=settled, notes=notes)
    loss_module = parts.loss if isinstance(parts.loss, nn.Module) else None
    return Divided(laid_out.parts, plan, mesh, laid_out.stages, loss_module)


def make_state(loaded: Loaded, divided: Divided, facts: RunFacts, request: Request, hardware: Hardware) -> MadeRun:
    """Make optimizer, schedule and state, seed the generators, and load the state of the earlier part of the run."""
    recipe, earlier = loaded.recipe, request.earlier
    _fill_reference(divided, recipe, request, hardware)
    live = build_live(divided.parts, loaded, divided.plan)
    state = live.state
    state.spikes, state.stages = SpikeDetector(recipe.spikes.factor), divided.mesh.stages
    state.loss = divided.loss_module
    sink_factories(recipe.log.sinks)  # reports a missing package before the first step
    launch = {"job": request.launch.job, "call": request.launch.call, "ranks": request.world.size}
    provenance = describe_origin(recipe, divided.parts) | {"launch": launch}
    if divided.parts.custom.generators is None:
        seed_all(recipe.seed)  # training draws the same numbers whatever preceded it
    else:
        divided.parts.custom.generators.restore()
    parts, settled = divided.parts, live.plan.settled
    if "max_logits_bytes" in settled:
        parts = replace(parts, loss=partial(parts.loss, max_logits_bytes=settled["max_logits_bytes"]))
    if earlier is None:
        return MadeRun(live, parts, provenance, recipe.precision, [])
    precision = earlier.precision(recipe.precision, facts)
    state.scaler = Precision(precision, hardware.device.type).scaler(hardware.device)
    accepted = from_first_rank(request.world, earlier.load(state, loaded.as_written, precision, provenance))
    return MadeRun(live, parts, provenance, precision, accepted)


def _fill_reference(divided: Divided, recipe: Recipe, request: Request, hardware: Hardware) -> None:
    """Compute the reference of a loss that compares with the initial weights, while the model still has them."""
    parts = divided.parts
    if isinstance(parts.loss, GRPO):
        parts.loss.keep_reference(parts.model)
    named = recipe.precision
    precision = Precision("fp32" if named is None or named == "auto" else named, hardware.device.type)
    fill(
        [parts.train, *parts.val_sets.values()],
        parts.model,
        hardware.device,
        batch=divided.plan.batch.micro,
        world=request.world,
        autocast=precision.autocast,
        precision=precision.name,
        say=request.say,
    )


def open_data(made: MadeRun, recipe: Recipe, mesh: RankMesh, request: Request, hardware: Hardware) -> OpenedData:
    """Open the training data and read the first batch. Raises DataError if there is none."""
    state, plan = made.live.state, made.live.plan
    loading = build_loading(made.parts, recipe, plan, hardware.device, quarantine=state.quarantine, world=mesh.data)
    data, begin_s = training_batches(made.parts, loading, state.data, request.say), time.perf_counter()
    first = next(batches := iter(data), None)
    start_s = time.perf_counter() - begin_s
    if first is None:
        raise DataError("the training data gave no batch", remedy="check that it is not empty or used up")
    return OpenedData(first, chain([first], batches), data, loading, start_s)


def try_out(
    loaded: Loaded, divided: Divided, made: MadeRun, planned: Planned, request: Request, hardware: Hardware
) -> Job:
    """Read the first batch and return the job with the measurements of its dry run and its header."""
    recipe = loaded.recipe
    world = request.world
    earlier = request.earlier
    state = made.live.state
    _require_steps_left(loaded, made.live.plan, state)
    if earlier:
        earlier.lock.beat(state.step + 1)  # reading the first batch and the dry run count as part of this step
    data = open_data(made, recipe, divided.mesh, request, hardware)
    left_out = frozenset((*recipe.data.quarantine, *state.quarantine))
    supervision = audit_parts(made.parts, data.first, left_out) if world.rank == 0 else ()
    if world.size == 1:  # the first batch of one rank says nothing about the others
        require_supervised(supervision)
    packing = _packing_notes(loaded, made, data.first, world)
    notes = (*made.live.plan.notes, *notes_of_data(made.provenance, data.stream.resumed), *packing)
    job = Job(
        loaded,
        made.parts,
        replace(made.live.plan, notes=notes),
        made.live,
        hardware,
        data.batches,
        made.provenance,
        MatmulMode.for_precision(recipe.precision),
        made.accepted,
        divided.mesh,
        divided.stages,
        Measurements() if data.stream.reads_in_workers else Measurements(pace_of_first(data)),
        supervision,
        _used_before(loaded, request, hardware),
    )
    noted = replace(job, plan=replace(job.plan, notes=(*job.plan.notes, *_generator_notes(job))))
    require_same_data(world, made.provenance["data"])
    tried = measure(noted, data, planned.facts, planned.kept, made.requested_precision)
    agreed = replace(tried, plan=from_first_rank(world, tried.plan))
    if rlimits() and free_bytes(torch.device("cpu")) > MIN_MEMORY_HEADROOM_RATIO * sum(
        (agreed.plan.predicted.memory_bytes or {}).values()
    ):
        retain_blocks()
    if not earlier:
        state.scaler = agreed.precision.scaler(hardware.device)
    ends_in_s = agreed.plan.predicted.ends_in_s if loaded.within_s is None else loaded.within_s
    header = run_header(agreed, data.first, earlier)
    predicted = replace(agreed.plan.predicted, ends_in_s=ends_in_s)
    return replace(agreed, plan=replace(agreed.plan, header=header, predicted=predicted))


def _packing_notes(loaded: Loaded, made: MadeRun, first: StepBatch, world: World) -> Iterator[Note]:
    """Yield a note on packed samples. Raises RecipeError if samples of the first batch see each other."""
    packing, degrees = loaded.recipe.data.packing, made.live.plan.degrees
    if packing.by == "none":
        return
    with at_recipe(loaded.source, "data.packing"):
        for axis in ("context", "pipeline"):
            if getattr(degrees, axis) > 1:
                remedy = f"set data.packing: none, or leave parallel.{axis} out"
                raise UsageError(f"packed samples cannot be divided by parallel.{axis}", remedy=remedy)
        is_divided = made.live.state.is_divided
        data = first.micro[0].data
        # ranks that divide the weights call the model together, so all of them compare the samples of the first rank
        found = require_isolated(made.live.state.model, from_first_rank(world, data) if is_divided else data)
    fill = getattr(made.parts.train.dataset, "fill", None)
    rows = "" if fill is None else f", tokens fill {fill:.0%} of the rows"
    yield Note("packing", f"{packing.by}{rows}", f"attention stays within each sample: {found.lines()[-1]}")


def _generator_notes(job: Job) -> Iterator[Note]:
    """Yield a note if the order of the user's loader does not come from its generator."""
    loader = job.parts.train.loader if job.parts.train.order is None and not job.draws_as_a_loop else None
    if loader is not None and loader.has_generator:
        why = "the order follows from the seed of the run, on any number of processes"
        yield Note("not used", "generator of the DataLoader", why)


def _require_steps_left(loaded: Loaded, plan: Plan, state: TrainState) -> None:
    """Raise UsageError if a resumed run has already reached its end. ``within_budget`` checks a limit on cost."""
    recipe = loaded.recipe
    if loaded.cost is None and until_of(plan)(state) >= 1.0:
        done = f"{state.step:,} steps in {state.elapsed_s:.4g} s, until: {recipe.until}"
        longer = doubled_length(recipe.until, live=is_live(recipe.model.use))
        raise UsageError(f"the run has already reached its end ({done})", remedy=f"add {longer}")


def _logits_limit(
    parts: Parts, resolved: Resolved, facts: RunFacts, memory: Device, earlier: Earlier | None
) -> dict[str, int | None]:
    """Return the size of logits in bytes above which the loss is computed in chunks; empty for a loss without chunks.

    The decision of an earlier part of the run is kept, because chunks change the last bits of the loss.
    """
    if resolved.loaded.recipe.loss.chunked != "auto" or "max_logits_bytes" not in parameters_of(parts.loss):
        return {}
    if earlier and "max_logits_bytes" in earlier.resolved:
        return {"max_logits_bytes": earlier.resolved["max_logits_bytes"]}
    if resolved.chunked is not None:
        return {"max_logits_bytes": 0 if resolved.chunked else None}
    recipe = resolved.loaded.recipe
    held = memory_bytes(
        recipe.optimizer.use,
        recipe.optimizer.args,
        parameters=facts.parameters,
        trainable=facts.trainable,
        activations=0,
        offloaded=recipe.optimizer.offload is True and facts.device != "cpu",
    )
    return {"max_logits_bytes": room_for_logits(memory.usable_bytes, sum(held.values()))}


PLAIN_MEAN_NOTE = (
    "the loss returns a plain mean; if it ignores padding or targets, return tw.Loss(total, weight), which is exact"
)


UNCOMPILED_NOTE = "its times are upper bounds, without the time to compile"


class OpenedData(NamedTuple):
    """The training data after their first batch was read, which took ``start_s``. ``batches`` includes ``first``."""

    first: StepBatch
    batches: Iterator[StepBatch]
    stream: StepBatches
    loading: Loading
    start_s: float


def measure(job: Job, data: OpenedData, facts: RunFacts, kept: ResumedValues, requested: str | None) -> Job:
    """Return the job with the measurements of a dry run of its first batch. Its state is unchanged.

    All ranks that compute together must call it. If ranks compute independently, only the first rank measures.

    Args:
        job: The planned job.
        data: The opened training data.
        facts: Facts that the plan was made from.
        kept: The values that a resumed run keeps from its earlier plan.
        requested: The precision in the recipe, None if it is not set; in a resumed run the precision decided before.
    """
    if job.world.rank > 0 and not job.divides_weights:
        return job
    tried = _with_dry_run(job, facts, data.first, requested)
    reading, batches = _reading(job, data, tried)
    plan, cost = _with_times(replace(job, plan=tried), reading, kept)
    if job.state.step:  # the run is resumed, so the dry run did not measure the loss of the initial weights
        plan = replace(plan, predicted=replace(plan.predicted, initial_loss=None))
    peak = None
    if plan.predicted.step_s is not None and not job.divides_weights:
        peak = peak_samples_s(job.parts, data.first.micro[0], known_device(job.device), plan.precision)
    measured = Measurements(reading, cost, peak and peak * job.world.size)
    return replace(job, plan=plan, batches=batches, measured=measured)


def _reading(job: Job, data: OpenedData, plan: Plan) -> tuple[ReadingPace, Iterator[StepBatch]]:
    """Return the wait for data per step, and the stream of batches including batches read for the measurement."""
    if not data.stream.reads_in_workers:
        return pace_of_first(data), job.batches
    if data.stream.depends_on_training or plan.predicted.step_s is None:
        return ReadingPace(), job.batches
    loading = data.loading
    return time_workers(
        job.batches,
        workers=loading.workers,
        prefetch=loading.prefetch,
        compute_s=plan.predicted.step_s,
        start_s=data.start_s,
        most=None if loading.loader is None else _left_of_epoch(plan, job.state, loading.batch_size) - 1,
    )


def pace_of_first(data: OpenedData) -> ReadingPace:
    """Return the pace of reading in this process, from the time of the first batch."""
    read_s = data.start_s / data.stream.at_once
    return ReadingPace(wait_s=read_s, read_s=read_s, start_s=data.start_s)


def _with_first_batch(job: Job, facts: RunFacts, first: StepBatch, requested: str | None) -> Plan:
    """Return the plan with measurements of the first micro-batch: loss, time per precision and threads, memory."""
    one = replace(first, micro=(copy.deepcopy(first.micro[0]),))  # a model may write into its input
    together = job.world if job.divides_weights else SOLO
    seen = try_batch(job.state, one, job.parts.loss, job.precision_of, facts, requested, together)
    if job.world.size == 1:
        left_out = {*job.recipe.data.quarantine, *job.state.quarantine}
        require_labels_in_range(job.parts, job.plan, seen.outputs, left_out)
    notes = [Note("loss", "weighted by batch size", PLAIN_MEAN_NOTE)] if seen.mean else []
    notes += [Note("dry run", "uncompiled", UNCOMPILED_NOTE)] if job.recipe.model.compile else []
    notes.extend(memory_note(job.recipe.optimizer.use, seen.optimizer_bytes))
    ask, degrees = job.recipe.optimizer, job.plan.degrees
    fraction = tensor_share(job.parts.model, degrees)
    average_bytes, buffer_bytes = _average_and_buffers_bytes(job.state)
    predicted = memory_bytes(
        ask.use,
        ask.args,
        parameters=round(facts.parameters * fraction),
        trainable=round(facts.trainable * fraction),
        activations=seen.activation_bytes,
        average=average_bytes,
        buffers=buffer_bytes,
        inputs=sum(tensor.nbytes for tensor in first.tensors),
        offloaded=ask.offload is True and job.device.type != "cpu",
        shard=degrees.shard,
        zero=job.recipe.parallel.zero,
    )
    if seen.optimizer_bytes is not None and ask.offload is not True:
        predicted["optimizer"] = seen.optimizer_bytes
    return with_dry_run(
        replace(job.plan, notes=(*job.plan.notes, *notes)),
        precision=requested,
        facts=facts,
        loss=seen.loss,
        outputs=seen.outputs,
        seconds={mode: seconds * len(first.micro) + seen.update_s for mode, seconds in seen.seconds.items()},
        thread_s={mode: seconds * len(first.micro) for mode, seconds in seen.thread_s.items()},
        memory_bytes=predicted,
    )


def _left_of_epoch(plan: Plan, state: TrainState, batch_size: int) -> int:
    """Return the steps left in this epoch. Only after them may the order of the next epoch be drawn."""
    return (plan.steps_per_epoch or 0) - state.data.position // batch_size


def _average_and_buffers_bytes(state: TrainState) -> tuple[int, int]:
    """Return the bytes of averaged weights, and of buffers with the copies that undo a failed step."""
    average = locals_of(state.ema.shadow.values()) if isinstance(state.ema, WeightAverage) else []
    modules = [state.model, *([state.loss] if state.loss is not None else [])]
    sizes = {id(buffer): buffer.nbytes for module in modules for buffer in module.buffers()}.values()
    return sum(each.nbytes for each in average), sum(
        size * (2 if size <= MAX_COPIED_TABLE_BYTES else 1) for size in sizes
    )


def _with_dry_run(job: Job, facts: RunFacts, first: StepBatch, requested: str | None) -> Plan:
    """Do a dry run of the first batch. ``step_s`` of the returned plan excludes the wait for data."""
    if job.parts.custom.advance is not None:
        return without_dry_run(job.plan, job.recipe)
    if job.stages is not None:
        return _without_dry_run(job.plan, facts, requested, PIPELINE_WITHOUT_DRY_RUN)
    together = job.world if job.divides_weights else SOLO
    tried, why = job.plan, ""
    try:
        tried = _with_first_batch(job, facts, first, requested)
    except NotIsolated as error:
        why = f"the dry run would have side effects: {error}"
    if not together.least(int(not why)):
        none = f"{why or 'another rank cannot do one'}; no times, no first loss"
        return _without_dry_run(job.plan, facts, requested, Note("dry run", "none", none))
    return from_first_rank(together, tried)  # the times of ranks that compute together differ


def _without_dry_run(plan: Plan, facts: RunFacts, requested: str | None, why: Note) -> Plan:
    chosen, note = choose_precision(requested, facts.device, facts.low_precision, {})
    return replace(plan, precision=chosen, notes=(*plan.notes, note, why))


def _with_times(job: Job, reading: ReadingPace, kept: ResumedValues) -> tuple[Plan, EvaluationCost | None]:
    """Return the plan with the predicted time of the run and the size of its evaluations, and their cost."""
    plan = job.plan
    if plan.predicted.step_s is None:
        return plan, None
    notes = (*plan.notes, *reading.notes())
    step_s = plan.predicted.step_s + reading.wait_s
    paced = replace(plan, predicted=replace(plan.predicted, step_s=step_s, wait_s=reading.wait_s), notes=notes)
    cost = _evaluation_cost(paced, job)
    evaluated = _with_evaluations(paced, job, cost, kept)
    seconds = {
        **predicted_seconds(evaluated, cost, used=until_of(evaluated)(job.state)),
        **_examination_seconds(evaluated, job),
    }
    return replace(evaluated, predicted=replace(evaluated.predicted, seconds=seconds)), cost


def _with_evaluations(plan: Plan, job: Job, cost: EvaluationCost | None, kept: ResumedValues) -> Plan:
    """Return the plan with the affordable number of batches for each evaluation during training."""
    if cost is None or job.recipe.evaluation.batches is not None or kept.evaluate_batches is not None:
        return plan
    within_s = job.loaded.within_s
    batches = affordable_batches(plan, cost, within_s)
    limited = replace(plan, cadence=replace(plan.cadence, evaluate_batches=batches))
    whole = plan.cadence.evaluates_whole and not (
        within_s is not None and skips_full_evaluation(limited, cost, within_s)
    )
    decided = replace(limited, cadence=replace(limited.cadence, evaluates_whole=whole))
    notes = [evaluation_note(decided, cost)] if decided.cadence.evaluate_batches else []
    return replace(decided, notes=(*plan.notes, *notes))


def _evaluation_cost(plan: Plan, job: Job) -> EvaluationCost | None:
    loading = build_loading(job.parts, job.recipe, plan, job.device, world=job.mesh.data)
    sets = validation_sets(job.parts, job.recipe.evaluation, loading)
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


def copy_first_weights(model: nn.Module, loss: object, world: World) -> None:
    """Copy weights and buffers of the first rank to all ranks, also of a ``loss`` that is a module.

    Raises UsageError if the model synchronizes ranks itself (DistributedDataParallel, SyncBatchNorm).
    """
    if world.size == 1:
        return
    _require_no_exchange(model)
    roots = [model, *([loss] if isinstance(loss, nn.Module) else [])]
    weights = [each for root in roots for each in root.parameters()]
    buffers = [each for root in roots for each in root.buffers() if each.is_contiguous()]  # skips expanded tensors
    world.copy_first_([*weights, *buffers])


def require_same_data(world: World, data: Mapping[str, str]) -> None:
    """Raise DataError if the data fingerprints in ``data`` differ between ranks.

    Fingerprints are not compared if one dataset was read in full and the other in part.
    """
    prints = world.collect(dict(data))
    for name, first in prints[0].items():
        for rank, other in enumerate(prints):
            theirs = other.get(name, "")
            if theirs != first and theirs.partition("(")[2] == first.partition("(")[2]:
                raise DataError(
                    f"rank {rank} has different data in data.{name} than rank 0: an index gives another sample",
                    remedy="build the same dataset on every rank (a fixed seed for random splits, sorted file names); "
                    "Trainwright distributes the samples over the ranks",
                )


def _require_no_exchange(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise UsageError(
                "the model is wrapped in DistributedDataParallel, and gradients would be summed twice",
                remedy="pass the module itself: Trainwright synchronizes the ranks",
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                "the model has SyncBatchNorm, which exchanges statistics in each forward pass, even in the dry run "
                "that the first rank does alone",
                remedy="use BatchNorm in the model and set parallel.sync_batchnorm: true, which exchanges statistics "
                "in training steps only",
            )
