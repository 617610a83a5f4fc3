"""Prepares a run: from a recipe to live objects and a dry run of one batch. Nothing is trained here.

``prepare`` goes through these stages. Each is a function of values that returns a new one:

    find_hardware    the machine and the device of this rank
    decide           the recipe with all open settings decided
    make_parts       model, data sets and loss
    plan_run         the plan, by arithmetic
    divide           the part of the model on this rank
    make_state       optimizer, schedule and state; in a resumed run loaded from the checkpoint
    try_out          the stream of batches, and the plan with measurements of a dry run (measure.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from trainwright.assembly.assemble import Parts, at_recipe, build_loading, build_parts, gather_facts, training_batches
from trainwright.assembly.assemble import prepare as prepare_parts
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import seed_all, set_deterministic
from trainwright.checkpoint.shards import is_sharded
from trainwright.checkpoint.spikes import SpikeDetector
from trainwright.checkpoint.train_state import TrainState
from trainwright.data.epoch_length import with_epoch_counted
from trainwright.distributed import ALONE, SOLO, Launch, RankMesh, World, choose_device, make_mesh, usable_threads
from trainwright.distributed.memory import adapt_to_limits, free_bytes, retain_blocks, rlimits
from trainwright.engine.precision import MatmulMode, Precision
from trainwright.engine.stage_passes import PipelineStages
from trainwright.errors import DataError, UsageError
from trainwright.finetune.isolation import require_isolated
from trainwright.finetune.reference import fill
from trainwright.monitoring.sinks.factories import sink_factories
from trainwright.plan.devices import Device
from trainwright.plan.machine import read_machine
from trainwright.plan.make import Note, Plan, ResumedValues, RunFacts, make_plan
from trainwright.plan.memory import memory_bytes, room_for_logits
from trainwright.plan.parallel import solve_layout
from trainwright.plan.trace.local_device import local_device, nominal_cpu
from trainwright.plan.trace.resolve import Resolved, has_open_settings, is_for, read_resolved, resolve
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.resolve import parameters_of
from trainwright.training.custom_objects import Live, build_live
from trainwright.training.header import run_header
from trainwright.training.job import Hardware, Job, Measurements, until_of
from trainwright.training.layout import keep_compression, lay_out
from trainwright.training.measure import OpenedData, measure, pace_of_first
from trainwright.training.problems import all_problems_reported
from trainwright.training.rank_agreement import copy_first_weights, from_first_rank, require_same_data
from trainwright.training.resume import Earlier, doubled_length
from trainwright.training.run_metadata import describe_origin, notes_of_data
from trainwright.training.supervision import audit_parts, require_supervised

MIN_MEMORY_HEADROOM_RATIO = 16
"""Memory limit / planned memory above which a fragmented heap does not reach the limit."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The request for a run, as its caller passes it.

    Attributes:
        parts: Live objects instead of those that the recipe names.
        earlier: The earlier part of a resumed run.
        world: All ranks.
        launch: How this process was started.
        say: Receives messages about the data, also later during training.
    """

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
    say: Say = lambda line: None,
) -> Job:
    """Build and plan a run and do a dry run. Nothing is trained, and the random generators are unchanged.

    With several ranks, the first one decides. The batch of the dry run is the first one to be trained on, because a
    stream is read only once. Measurements and choices of an ``earlier`` part of the run are kept, because other ones
    would change the last bits of the results.

    Args:
        loaded: The recipe.
        parts: Live objects instead of those that the recipe names.
        earlier: The earlier part of a resumed run.
        world: All ranks.
        launch: How this process was started.
        say: Receives messages about the data, also later during training.

    Raises:
        RecipeError: With all problems of the recipe.
    """
    request = Request(parts, earlier, world, launch, say)
    with all_problems_reported(loaded, parts, world.size):
        hardware = find_hardware(loaded, request)
        resolved = decide(loaded, request, hardware)
        whole = make_parts(resolved, request, hardware)
        planned = plan_run(resolved, whole, request, hardware)
        divided = divide(resolved, whole, planned, request, hardware)
        made = make_state(resolved.loaded, divided, planned.facts, request, hardware)
        return try_out(resolved.loaded, divided, made, planned, request, hardware)


def find_hardware(loaded: Loaded, request: Request) -> Hardware:
    """Return the machine, the device of this rank, and its memory before the model is built."""
    machine = read_machine()
    adapt_to_limits()
    with at_recipe(loaded, "device"):
        device = choose_device(loaded.recipe.device, request.launch.local_rank)
    if loaded.recipe.deterministic:
        set_deterministic()
    share = nominal_cpu(machine).of_ranks(request.world.size) if device.type == "cpu" else None
    return Hardware(machine, device, share or local_device(probe=False))


def decide(loaded: Loaded, request: Request, hardware: Hardware) -> Resolved:
    """Return the recipe with all open settings decided by the first rank."""
    return from_first_rank(
        request.world, _resolve(loaded, request.parts, request.earlier, hardware.memory, request.world.size)
    )


def make_parts(resolved: Resolved, request: Request, hardware: Hardware) -> Parts:
    """Return model, data sets and loss: the passed objects, or those that the recipe names."""
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
    with at_recipe(loaded, ""):
        facts = with_epoch_counted(found, parts.train, recipe, request.say)
        kept = earlier.kept_from_plan(recipe, facts, solve_layout(recipe, ranks).data) if earlier else ResumedValues()
        plan = from_first_rank(request.world, make_plan(recipe, facts, ranks=ranks, kept=kept))
    return Planned(plan, facts, kept)


def _threads(recipe: Recipe, earlier: Earlier | None, hardware: Hardware) -> tuple[int, ...]:
    """Return the numbers of threads that the dry run may choose from."""
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
    keep_compression(state, recipe.parallel, divided.mesh.sums)
    sink_factories(recipe.log.sinks)  # reports a missing package before the first step
    launch = {"job": request.launch.job, "call": request.launch.call, "ranks": request.world.size}
    provenance = describe_origin(recipe, divided.parts) | {"launch": launch}
    if divided.parts.generators is None:
        seed_all(recipe.seed)  # training draws the same numbers whatever preceded it
    else:
        divided.parts.generators.restore()
    parts = _with_loss_of_logits(divided.parts, live.plan)
    if earlier is None:
        return MadeRun(live, parts, provenance, recipe.precision, [])
    precision = earlier.precision(recipe.precision, facts)
    state.scaler = Precision(precision, hardware.device.type).scaler(hardware.device)
    accepted = from_first_rank(request.world, earlier.load(state, recipe, precision, provenance))
    return MadeRun(live, parts, provenance, precision, accepted)


def _fill_reference(divided: Divided, recipe: Recipe, request: Request, hardware: Hardware) -> None:
    """Compute the reference of a loss that compares with the initial weights, while the model still has them."""
    parts, named = divided.parts, recipe.precision
    precision = Precision("fp32" if named is None or named == "auto" else named, hardware.device.type)
    fill(
        [parts.train, parts.val, *parts.more_val.values()],
        parts.model,
        hardware.device,
        batch=divided.plan.batch.micro,
        world=request.world,
        autocast=precision.autocast,
        precision=precision.name,
        say=request.say,
    )


def _with_loss_of_logits(parts: Parts, plan: Plan) -> Parts:
    settled = plan.settled or {}
    if "max_logits_bytes" not in settled:
        return parts
    return replace(parts, loss=partial(parts.loss, max_logits_bytes=settled["max_logits_bytes"]))


def open_data(made: MadeRun, recipe: Recipe, mesh: RankMesh, request: Request, hardware: Hardware) -> _Opened:
    """Read the first batch. Raises DataError if there is none."""
    state, plan = made.live.state, made.live.plan
    loading = build_loading(made.parts, recipe, plan, hardware.device, quarantine=state.quarantine, world=mesh.data)
    data, begin_s = training_batches(made.parts, loading, state.data, request.say), time.perf_counter()
    first = next(batches := iter(data), None)
    start_s = time.perf_counter() - begin_s
    if first is None:
        raise DataError("the training data gave no batch", remedy="check that it is not empty or used up")
    opened = OpenedData(first, loading, start_s, data.at_once, data.reads_in_workers, data.depends_on_training)
    return _Opened(opened, chain([first], batches), data.resumed)


@dataclass(frozen=True)
class _Opened:
    data: OpenedData
    batches: Iterator[StepBatch]
    resumed: str


def try_out(
    loaded: Loaded, divided: Divided, made: MadeRun, planned: Planned, request: Request, hardware: Hardware
) -> Job:
    """Read the first batch and return the job with the measurements of its dry run and its header."""
    recipe = loaded.recipe
    world = request.world
    earlier = request.earlier
    state = made.live.state
    _require_steps_left(recipe, made.live.plan, state)
    if earlier:
        earlier.lock.beat(state.step + 1)  # reading its batch and the dry run belong to the step
    opened = open_data(made, recipe, divided.mesh, request, hardware)
    left_out = frozenset((*recipe.data.quarantine, *state.quarantine))
    supervision = audit_parts(made.parts, opened.data.first, left_out) if world.rank == 0 else ()
    if world.size == 1:  # the first batch of one rank says nothing about the others
        require_supervised(supervision)
    packing = _packing_notes(loaded, made, opened.data.first, divided)
    notes = (*made.live.plan.notes, *notes_of_data(made.provenance, opened.resumed), *packing)
    job = Job(
        loaded,
        made.parts,
        replace(made.live.plan, notes=notes),
        made.live,
        hardware,
        opened.batches,
        made.provenance,
        MatmulMode.for_precision(recipe.precision),
        made.accepted,
        divided.mesh,
        divided.stages,
        Measurements() if opened.data.reads_in_workers else Measurements(pace_of_first(opened.data)),
        supervision,
    )
    noted = replace(job, plan=replace(job.plan, notes=(*job.plan.notes, *_generator_notes(job))))
    require_same_data(world, made.provenance["data"])
    tried = measure(noted, opened.data, planned.facts, planned.kept, made.requested_precision)
    agreed = replace(tried, plan=from_first_rank(world, tried.plan))
    if rlimits() and free_bytes(torch.device("cpu")) > MIN_MEMORY_HEADROOM_RATIO * sum(
        (agreed.plan.memory_bytes or {}).values()
    ):
        retain_blocks()
    if not earlier:
        state.scaler = agreed.precision.scaler(hardware.device)
    ends_in_s = agreed.plan.ends_in_s if loaded.within_s is None else loaded.within_s
    header = run_header(agreed, opened.data.first, earlier)
    return replace(agreed, plan=replace(agreed.plan, header=header, ends_in_s=ends_in_s))


def _packing_notes(loaded: Loaded, made: MadeRun, first: StepBatch, divided: Divided) -> Iterator[Note]:
    """Yield a note on packed samples. Raises RecipeError if samples of the first batch see each other."""
    packing, degrees = loaded.recipe.data.packing, made.live.plan.degrees
    if packing.by == "none":
        return
    with at_recipe(loaded, "data.packing"):
        for axis in ("context", "pipeline"):
            if getattr(degrees, axis) > 1:
                remedy = f"set data.packing: none, or leave parallel.{axis} out"
                raise UsageError(f"packed samples cannot be divided by parallel.{axis}", remedy=remedy)
        if is_sharded(made.live.state.model) or degrees.tensor > 1:
            yield Note("packing", packing.by, "not compared with samples alone, because ranks divide the weights")
            return
        found = require_isolated(made.live.state.model, first.micro[0])
    fill = getattr(made.parts.train.dataset, "fill", None)
    rows = "" if fill is None else f", {fill:.0%} of the rows are tokens"
    yield Note("packing", f"{packing.by}{rows}", f"samples do not see each other: {found.lines()[-1]}")


def _generator_notes(job: Job) -> Iterator[Note]:
    """Yield a note if the order of the user's loader does not come from its generator."""
    loader = job.parts.train.loader if job.parts.train.order is None and not job.draws_as_a_loop else None
    if loader is not None and loader.has_generator:
        why = "the order follows from the seed of the run, on any number of processes"
        yield Note("not used", "generator of the DataLoader", why)


def _require_steps_left(recipe: Recipe, plan: Plan, state: TrainState) -> None:
    """Raise UsageError if a resumed run has already reached its end."""
    if until_of(plan)(state) >= 1.0:
        done = f"{state.step:,} steps in {state.elapsed_s:.4g} s, until: {recipe.until}"
        raise UsageError(f"the run has already reached its end ({done})", remedy=f"add {doubled_length(recipe.until)}")


def _logits_limit(
    parts: Parts, resolved: Resolved, facts: RunFacts, memory: Device, earlier: Earlier | None
) -> dict[str, int | None]:
    """Return the maximum size of logits in bytes before their loss is computed in chunks; empty for other losses.

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


def _resolve(loaded: Loaded, parts: Parts | None, earlier: Earlier | None, memory: Device, ranks: int) -> Resolved:
    """Return the recipe with all open settings decided, as in the earlier part of the run if there is one."""
    if not has_open_settings(loaded.recipe, ranks):
        return Resolved(loaded)
    if earlier and (kept := earlier.resolved) and is_for(kept, loaded.recipe, ranks):
        return read_resolved(loaded, kept)
    with at_recipe(loaded, "model"):
        return resolve(loaded, memory, parts=parts, ranks=ranks)
