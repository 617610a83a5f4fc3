"""Prepares a run: from a recipe to live objects that were tried with one batch. Nothing is trained here.

``prepare`` goes through these stages. Each is a function of values that returns a new one:

    find_hardware    what this rank computes on
    decide           the recipe with each setting decided that it leaves to the plan
    make_parts       model, data sets and loss
    plan_run         the plan, by arithmetic
    divide           the part of the model that this rank computes with
    make_state       optimizer, schedule and state; in a resumed run as the earlier part left them
    try_out          the stream of batches, and the plan with what a dry run of the first one measures (measure.py)
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
from trainwright.checkpoint.spikes import SpikeDetector
from trainwright.checkpoint.train_state import TrainState
from trainwright.data.epoch_length import with_epoch_counted
from trainwright.distributed import ALONE, SOLO, Launch, RankMesh, World, choose_device, make_mesh, usable_threads
from trainwright.distributed.memory import adapt_to_limits, free_bytes, retain_blocks, rlimits
from trainwright.engine.precision import MatmulMode, Precision
from trainwright.engine.stage_passes import PipelineStages
from trainwright.errors import DataError, UsageError
from trainwright.monitoring.sinks.factories import sink_factories
from trainwright.plan.devices import Device
from trainwright.plan.machine import read_machine
from trainwright.plan.make import Kept, Note, Plan, RunFacts, make_plan
from trainwright.plan.memory import memory_bytes, room_for_logits
from trainwright.plan.parallel import solve_layout
from trainwright.plan.trace.local_device import local_device, nominal_cpu
from trainwright.plan.trace.resolve import Resolved, is_for, left_open, resolve, resolved_before
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.resolve import parameters_of
from trainwright.training.alike import begin_alike, first_of, require_same_data
from trainwright.training.header import run_header
from trainwright.training.job import Hardware, Job, Measured, until_of
from trainwright.training.layout import keep_compression, lay_out
from trainwright.training.measure import OpenedData, measure, pace_of_first
from trainwright.training.own_objects import Live, build_live
from trainwright.training.problems import all_at_once
from trainwright.training.resume import Earlier, doubled
from trainwright.training.run_metadata import describe_origin, notes_of_data

SPACIOUS = 16
"""Multiple of the planned memory. A limit that leaves more than this is not reached by a fragmented heap."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What a run is made of, as its caller gives it.

    Attributes:
        parts: Live objects instead of what the recipe names.
        earlier: The part of the run that came before, in a run that is resumed.
        world: All ranks.
        launch: How this process was started.
        say: Is told what the data have to say, also later on.
    """

    parts: Parts | None
    earlier: Earlier | None
    world: World
    launch: Launch
    say: Say


@dataclass(frozen=True)
class Planned:
    """A plan by arithmetic, and what it follows from: facts, and what a resumed run keeps of its earlier plan."""

    plan: Plan
    facts: RunFacts
    kept: Kept


@dataclass(frozen=True)
class Divided:
    """What this rank computes with. ``loss_module`` is the loss where it is a module, as the user gave it."""

    parts: Parts
    plan: Plan
    mesh: RankMesh
    stages: PipelineStages | None
    loss_module: nn.Module | None


@dataclass(frozen=True)
class Made:
    """The live objects of a run. ``asked_precision`` is that of the recipe, or of the earlier part of the run."""

    live: Live
    parts: Parts
    provenance: dict[str, Any]
    asked_precision: str | None
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
    """Builds and plans a run and does a dry run; nothing is trained and the random generators stay as they are.

    Of several ranks the first one decides. The batch of the dry run is the first that will be trained on: a stream is
    read only once. What an ``earlier`` part of the run measured and chose stays, or the bits would change.

    Args:
        loaded: The recipe.
        parts: Live objects instead of what the recipe names.
        earlier: The earlier part of a run that is resumed.
        world: All ranks.
        launch: How this process was started.
        say: Is told what the data have to say, also later on.

    Raises:
        RecipeError: With all problems of the recipe.
    """
    asked = Asked(parts, earlier, world, launch, say)
    with all_at_once(loaded, parts, world.size):
        hardware = find_hardware(loaded, asked)
        resolved = decide(loaded, asked, hardware)
        whole = make_parts(resolved, asked, hardware)
        planned = plan_run(resolved, whole, asked, hardware)
        divided = divide(resolved, whole, planned, asked, hardware)
        made = make_state(resolved.loaded, divided, planned.facts, asked, hardware)
        return try_out(resolved.loaded, divided, made, planned, asked, hardware)


def find_hardware(loaded: Loaded, asked: Asked) -> Hardware:
    """Returns the machine, the device of this rank, and its memory before the model is there."""
    machine = read_machine()
    adapt_to_limits()
    with at_recipe(loaded, "device"):
        device = choose_device(loaded.recipe.device, asked.launch.local_rank)
    if loaded.recipe.deterministic:
        set_deterministic()
    share = nominal_cpu(machine).of_ranks(asked.world.size) if device.type == "cpu" else None
    return Hardware(machine, device, share or local_device(probe=False))


def decide(loaded: Loaded, asked: Asked, hardware: Hardware) -> Resolved:
    """Returns the recipe with what it leaves to the plan decided by the first rank."""
    return first_of(asked.world, _resolved(loaded, asked.parts, asked.earlier, hardware.memory, asked.world.size))


def make_parts(resolved: Resolved, asked: Asked, hardware: Hardware) -> Parts:
    """Returns model, data sets and loss: those that were handed over, or what the recipe names."""
    if asked.parts is None:
        return build_parts(resolved.loaded, hardware.device, resolved.planned)
    if asked.parts.prepared:
        return asked.parts
    return prepare_parts(asked.parts, resolved.loaded, hardware.device, resolved.planned)


def plan_run(resolved: Resolved, parts: Parts, asked: Asked, hardware: Hardware) -> Planned:
    """Returns the plan of the first rank, by arithmetic."""
    loaded, recipe, earlier, ranks = resolved.loaded, resolved.loaded.recipe, asked.earlier, asked.world.size
    quarantine = frozenset(recipe.data.quarantine)
    found = gather_facts(parts, hardware.device, hardware.machine, _threads(recipe, earlier, hardware), quarantine)
    with at_recipe(loaded, ""):
        facts = with_epoch_counted(found, parts.train, recipe, asked.say)
        kept = earlier.what_was_planned(recipe, facts, solve_layout(recipe, ranks).data) if earlier else Kept()
        plan = first_of(asked.world, make_plan(recipe, facts, ranks=ranks, kept=kept))
    return Planned(plan, facts, kept)


def _threads(recipe: Recipe, earlier: Earlier | None, hardware: Hardware) -> tuple[int, ...]:
    """The numbers of threads that the dry run may choose from."""
    if earlier:
        return (earlier.threads,)
    return (1,) if recipe.parallel.exact else usable_threads(hardware.device)


def divide(resolved: Resolved, parts: Parts, planned: Planned, asked: Asked, hardware: Hardware) -> Divided:
    """Divides the model among the ranks, in place, and returns the part of this one."""
    mesh = make_mesh(planned.plan.degrees, asked.world, hardware.device)
    begin_alike(parts.model, parts.loss, asked.world)
    laid_out = lay_out(parts, resolved.loaded, mesh, hardware.device)
    logits = first_of(asked.world, _logits(laid_out.parts, resolved, planned.facts, hardware.memory, asked.earlier))
    settled, notes = {**resolved.to_json(), **logits}, (*resolved.notes, *planned.plan.notes, *laid_out.notes)
    plan = replace(planned.plan, settled=settled, notes=notes)
    loss_module = parts.loss if isinstance(parts.loss, nn.Module) else None
    return Divided(laid_out.parts, plan, mesh, laid_out.stages, loss_module)


def make_state(loaded: Loaded, divided: Divided, facts: RunFacts, asked: Asked, hardware: Hardware) -> Made:
    """Makes optimizer, schedule and state, seeds the generators, and loads the state of the earlier part of the run."""
    recipe, earlier = loaded.recipe, asked.earlier
    live = build_live(divided.parts, loaded, divided.plan)
    state = live.state
    state.spikes, state.stages = SpikeDetector(recipe.spikes.factor), divided.mesh.stages
    state.loss = divided.loss_module
    keep_compression(state, recipe.parallel, divided.mesh.sums)
    sink_factories(recipe.log.sinks)  # a package that is missing is said before the first step
    launch = {"job": asked.launch.job, "call": asked.launch.call, "ranks": asked.world.size}
    provenance = describe_origin(recipe, divided.parts) | {"launch": launch}
    if divided.parts.generators is None:
        seed_all(recipe.seed)  # training draws the same numbers whatever was done to get here
    else:
        divided.parts.generators.restore()
    parts = _with_loss_of_logits(divided.parts, live.plan)
    if earlier is None:
        return Made(live, parts, provenance, recipe.precision, [])
    precision = earlier.precision(recipe.precision, facts)
    state.scaler = Precision(precision, hardware.device.type).scaler(hardware.device)
    accepted = first_of(asked.world, earlier.load(state, recipe, precision, provenance))
    return Made(live, parts, provenance, precision, accepted)


def _with_loss_of_logits(parts: Parts, plan: Plan) -> Parts:
    settled = plan.settled or {}
    if "max_logits_bytes" not in settled:
        return parts
    return replace(parts, loss=partial(parts.loss, max_logits_bytes=settled["max_logits_bytes"]))


def open_data(made: Made, recipe: Recipe, mesh: RankMesh, asked: Asked, hardware: Hardware) -> _Opened:
    """Reads the first batch. Raises DataError where there is none."""
    state, plan = made.live.state, made.live.plan
    loading = build_loading(made.parts, recipe, plan, hardware.device, quarantine=state.quarantine, world=mesh.data)
    data, begin_s = training_batches(made.parts, loading, state.data, asked.say), time.perf_counter()
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


def try_out(loaded: Loaded, divided: Divided, made: Made, planned: Planned, asked: Asked, hardware: Hardware) -> Job:
    """Reads the first batch and returns the job with what a dry run of it measures, and with its header."""
    recipe, world, earlier, state = loaded.recipe, asked.world, asked.earlier, made.live.state
    _require_something_left(recipe, made.live.plan, state)
    if earlier:
        earlier.lock.beat(state.step + 1)  # reading its batch and the dry run belong to the step
    opened = open_data(made, recipe, divided.mesh, asked, hardware)
    notes = (*made.live.plan.notes, *notes_of_data(made.provenance, opened.resumed))
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
        Measured() if opened.data.reads_in_workers else Measured(pace_of_first(opened.data)),
    )
    noted = replace(job, plan=replace(job.plan, notes=(*job.plan.notes, *_of_generator(job))))
    require_same_data(world, made.provenance["data"])
    tried = measure(noted, opened.data, planned.facts, planned.kept, made.asked_precision)
    agreed = replace(tried, plan=first_of(world, tried.plan))
    if rlimits() and free_bytes(torch.device("cpu")) > SPACIOUS * sum((agreed.plan.memory_bytes or {}).values()):
        retain_blocks()
    if not earlier:
        state.scaler = agreed.precision.scaler(hardware.device)
    ends_in_s = agreed.plan.ends_in_s if loaded.within_s is None else loaded.within_s
    header = run_header(agreed, opened.data.first, earlier)
    return replace(agreed, plan=replace(agreed.plan, header=header, ends_in_s=ends_in_s))


def _of_generator(job: Job) -> Iterator[Note]:
    """Says that the order of the user's loader does not follow from its own generator."""
    loader = job.parts.train.loader if job.parts.train.order is None and not job.draws_as_a_loop else None
    if loader is not None and loader.has_generator:
        why = "the order follows from the seed of the run, on any number of processes"
        yield Note("not used", "generator of the DataLoader", why)


def _require_something_left(recipe: Recipe, plan: Plan, state: TrainState) -> None:
    """Raises UsageError when a resumed run has done all that it was asked for."""
    if until_of(plan)(state) >= 1.0:
        done = f"{state.step:,} steps in {state.elapsed_s:.4g} s, until: {recipe.until}"
        raise UsageError(f"the run has done what it was asked for ({done})", remedy=f"add {doubled(recipe.until)}")


def _logits(
    parts: Parts, resolved: Resolved, facts: RunFacts, memory: Device, earlier: Earlier | None
) -> dict[str, int | None]:
    """How large the logits of a language model may be before its loss is computed in chunks; {} for other losses.

    An earlier part of the run has decided it: chunks have other last bits.
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


def _resolved(loaded: Loaded, parts: Parts | None, earlier: Earlier | None, memory: Device, ranks: int) -> Resolved:
    """The recipe with what it leaves to the plan decided: as it was for an earlier part of the run."""
    if not left_open(loaded.recipe, ranks):
        return Resolved(loaded)
    if earlier and (kept := earlier.resolved) and is_for(kept, loaded.recipe, ranks):
        return resolved_before(loaded, kept)
    with at_recipe(loaded, "model"):
        return resolve(loaded, memory, parts=parts, ranks=ranks)
