"""A run before its first step: built, planned and tried with one batch. run.py trains it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from trainwright.build.assemble import (
    Parts,
    at_recipe,
    build_loading,
    build_parts,
    draws_as_a_loop,
    gather_facts,
    is_live,
    training_batches,
    validation_sets,
)
from trainwright.build.assemble import prepare as prepare_parts
from trainwright.build.count_epoch import with_epoch_counted
from trainwright.build.resolve import find, parameters_of
from trainwright.engine.dry_run import Mode, time_evaluation
from trainwright.engine.guard import LARGEST_TABLE
from trainwright.engine.in_stages import PipelineStages, StagedPasses
from trainwright.engine.metrics import OutputKeeper
from trainwright.engine.own_step import make_own_step
from trainwright.engine.precision import MatmulMode, Precision, PrecisionName
from trainwright.engine.spikes import NO_SPIKES, SpikeGuard, SpikeHandler
from trainwright.engine.step import Probe, StepFn, make_step
from trainwright.engine.until import ByTheClock, Until, for_seconds, for_steps
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import DataError, UsageError
from trainwright.forecast.local_device import known_device, local_device, nominal_cpu
from trainwright.forecast.peak_pace import peak_samples_s
from trainwright.forecast.resolve import Resolved, is_for, left_open, resolve, resolved_before
from trainwright.observe.sinks.factories import sink_factories
from trainwright.plan.devices import Device
from trainwright.plan.explain import EXAMINATIONS
from trainwright.plan.machine import Machine, read_machine
from trainwright.plan.make import Kept, Note, Plan, RunFacts, choose_precision, make_plan, with_dry_run
from trainwright.plan.memory import memory_bytes, room_for_logits
from trainwright.plan.parallel import solve_layout
from trainwright.plan.reading import ReadingPace
from trainwright.plan.run_time import (
    LAST_EVALUATION,
    EvaluationCost,
    affordable_batches,
    evaluation_note,
    evaluations,
    foretold,
    training_time_s,
    without_whole,
)
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.catalog import SPIKE_POLICIES
from trainwright.state.average import WeightAverage
from trainwright.state.cursor import StepBatch
from trainwright.state.isolation import NotIsolated
from trainwright.state.rng import seed_all, set_deterministic
from trainwright.state.shards import locals_of
from trainwright.state.spikes import SpikeDetector
from trainwright.state.train_state import TrainState
from trainwright.training.alike import begin_alike, first_of, require_same_data
from trainwright.training.first_batch import try_batch
from trainwright.training.header import run_header
from trainwright.training.layout import NOT_TRIED, keep_compression, lay_out, rank_layout, tensor_share
from trainwright.training.own_objects import Live, build_live, measured_state, memory_note
from trainwright.training.own_step import untried
from trainwright.training.problems import all_at_once
from trainwright.training.reading import time_workers
from trainwright.training.resume import Earlier, doubled
from trainwright.training.run_metadata import describe_origin, notes_of_data
from trainwright.watching.budget import predicted_end_s, predicted_from_start_s
from trainwright.world import (
    ALONE,
    ONE,
    SOLO,
    Launch,
    RankMesh,
    World,
    choose_device,
    make_mesh,
    usable_threads,
)
from trainwright.world.memory import free_bytes, keep_blocks, mind_limits, rlimits

ENDING_S = 0.5
"""What the last save and the end of the process take, about."""

AMPLE = 16
"""Times what the plan says of the memory: where a limit leaves more, no heap in pieces will exceed it."""


@dataclass
class Job:
    """All that a run needs, live and planned; nothing of it has been trained.

    ``accepted`` are the differences to an earlier part of the run that were wanted; ``reading`` is how the dry run
    measured the reading of data; ``peak_samples_s`` the pace of all ranks at the peak rate of their devices.
    """

    loaded: Loaded
    parts: Parts
    plan: Plan
    built: Live
    device: torch.device
    machine: Machine
    batches: Iterator[StepBatch]
    provenance: dict[str, Any]
    matmul: MatmulMode
    accepted: list[str] = field(default_factory=list)
    mesh: RankMesh = ONE
    stages: PipelineStages | None = None
    evaluation_cost: EvaluationCost | None = None
    reading: ReadingPace = field(default_factory=ReadingPace)
    peak_samples_s: float | None = None

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def state(self) -> TrainState:
        return self.built.state

    @property
    def world(self) -> World:
        """All ranks."""
        return self.mesh.world

    @property
    def divides_weights(self) -> bool:
        """Whether a rank computes with a part of the weights or sequences: all must take part in whatever does so."""
        degrees = self.plan.degrees
        return degrees.ranks > degrees.replicate

    def staged(self, rows: int) -> StagedPasses | None:
        """The passes through the stages of a pipeline, with at most so many samples each."""
        return None if self.stages is None else StagedPasses(self.stages, self.mesh.stages, rows)

    @property
    def live(self) -> bool:
        """Whether its model was handed over in Python, so that no file can build it."""
        return is_live(self.recipe)

    @property
    def is_only_in_python(self) -> bool:
        """Live objects that no recorded function makes: only the script that made them can resume the run."""
        return self.live and not self.parts.rebuild.get("function")

    @property
    def draws_as_a_loop(self) -> bool:
        """Whether the user's loader draws from the generators of the process, as in a loop over it."""
        return draws_as_a_loop(self.parts, self.recipe, self.plan)

    @property
    def lr(self) -> float:
        """The base learning rate of the first parameter group."""
        assert self.plan.lr is not None, "it is known once the optimizer is made"
        return self.plan.lr

    @property
    def precision(self) -> Precision:
        return self.precision_of(self.plan.precision)

    def precision_of(self, name: PrecisionName) -> Precision:
        """Computes in that precision on the device of this rank."""
        return Precision(name, self.device.type, caches=not self.divides_weights)

    @property
    def marks(self) -> dict[str, float]:
        """Reference losses that the training set knows of (uniform, unigram, bigram), else none."""
        references = getattr(self.parts.train.dataset, "references", None)
        known: dict[str, float] = references() if callable(references) else {}
        return {name: value for name, value in known.items() if not name.endswith("_val")}


def prepare(
    loaded: Loaded,
    parts: Parts | None = None,
    *,
    earlier: Earlier | None = None,
    world: World = SOLO,
    launch: Launch = ALONE,
    say: Callable[[str], None] = lambda line: None,
) -> Job:
    """Builds and plans a run and does a dry run; nothing is trained and the random generators stay as they are.

    Of several ranks the first one decides. Raises RecipeError with all problems of the recipe.

    The batch of the dry run is the first that will be trained on: a stream is read only once. What an ``earlier`` part
    of the run measured and chose stays, or the bits would change. ``parts`` are live objects instead of what the recipe
    names. ``say`` is told what the data have to say, also later on.
    """
    with all_at_once(loaded, parts, world.size):
        return _prepared(loaded, parts, earlier, world, launch, say)


def _prepared(
    loaded: Loaded,
    parts: Parts | None,
    earlier: Earlier | None,
    world: World,
    launch: Launch,
    say: Callable[[str], None],
) -> Job:
    machine = read_machine()
    mind_limits()
    with at_recipe(loaded, "device"):
        device = choose_device(loaded.recipe.device, launch.local_rank)
    if loaded.recipe.deterministic:
        set_deterministic()
    share = nominal_cpu(machine).of_ranks(world.size) if device.type == "cpu" else None
    memory = share or local_device(probe=False)  # as it is before the model is there
    resolved = first_of(world, _resolved(loaded, parts, earlier, memory, world.size))
    loaded, recipe = resolved.loaded, resolved.loaded.recipe
    if parts is None:
        parts = build_parts(loaded, device, resolved.planned)
    elif not parts.prepared:
        parts = prepare_parts(parts, loaded, device, resolved.planned)
    threads = (earlier.threads,) if earlier else (1,) if recipe.parallel.exact else usable_threads(device)
    facts = gather_facts(parts, device, machine, threads, frozenset(recipe.data.quarantine))
    with at_recipe(loaded, ""):
        facts = with_epoch_counted(facts, parts.train, recipe, say)
        kept = earlier.what_was_planned(recipe, facts, solve_layout(recipe, world.size).data) if earlier else Kept()
        plan = first_of(world, make_plan(recipe, facts, ranks=world.size, kept=kept))
    mesh = make_mesh(plan.degrees, world, device)
    begin_alike(parts.model, parts.loss, world)
    loss_module = parts.loss if isinstance(parts.loss, nn.Module) else None
    parts, stages, cuts = lay_out(parts, loaded, mesh, device)
    settled = {**resolved.to_json(), **first_of(world, _logits(parts, resolved, facts, memory, earlier))}
    plan = replace(plan, settled=settled, notes=(*resolved.notes, *plan.notes, *cuts))
    live = build_live(parts, loaded, plan)
    plan, state = live.plan, live.state
    state.spikes, state.stages = SpikeDetector(recipe.spikes.factor), mesh.stages
    state.loss = loss_module
    keep_compression(state, recipe.parallel, mesh.sums)
    sink_factories(recipe.log.sinks)  # a package that is missing is said before the first step
    provenance = describe_origin(recipe, parts) | {
        "launch": {"job": launch.job, "call": launch.call, "ranks": world.size}
    }
    if "max_logits_bytes" in settled:
        parts = replace(parts, loss=partial(parts.loss, max_logits_bytes=settled["max_logits_bytes"]))
    if parts.generators is None:
        seed_all(recipe.seed)  # training draws the same numbers whatever was done to get here
    else:
        parts.generators.restore()
    precision, accepted = recipe.precision, list[str]()
    if earlier:
        precision = earlier.precision(recipe.precision, facts)
        state.scaler = Precision(precision, device.type).scaler(device)
        accepted = first_of(world, earlier.load(state, recipe, precision, provenance))
    _require_something_left(recipe, plan, state)
    if earlier:
        earlier.lock.beat(state.step + 1)  # reading its batch and the dry run belong to the step
    loading = build_loading(parts, recipe, plan, device, quarantine=state.quarantine, world=mesh.data)
    data, begin_s = training_batches(parts, loading, state.data, say), time.perf_counter()
    first = next(batches := iter(data), None)
    start_s = time.perf_counter() - begin_s
    if first is None:
        raise DataError("the training data gave no batch", remedy="check that it is not empty or used up")
    plan = replace(plan, notes=(*plan.notes, *notes_of_data(provenance, data.resumed)))
    stream = chain([first], batches)
    matmul = MatmulMode.asked(recipe.precision)
    job = Job(loaded, parts, plan, live, device, machine, stream, provenance, matmul, accepted, mesh, stages)
    loader = parts.train.loader if parts.train.order is None and not job.draws_as_a_loop else None
    if loader is not None and loader.has_generator:
        why = "the order follows from the seed of the run, on any number of processes"
        job.plan = replace(job.plan, notes=(*job.plan.notes, Note("not used", "generator of the DataLoader", why)))
    if not data.reads_in_workers:
        read_s = start_s / data.at_once
        job.reading = ReadingPace(wait_s=read_s, read_s=read_s, start_s=start_s)
    require_same_data(world, provenance["data"])
    takes_part = world.rank == 0 or job.divides_weights
    plan = job.plan
    if takes_part:
        plan = _tried(job, facts, first, precision)
        if data.reads_in_workers and not data.looks_at_training and plan.step_s is not None:
            job.reading, job.batches = time_workers(
                stream,
                workers=loading.workers,
                prefetch=loading.prefetch,
                compute_s=plan.step_s,
                start_s=start_s,
                most=None if loading.loader is None else _left_of_epoch(plan, state, loading.batch_size) - 1,
            )
        plan = _with_times(plan, job, kept)
        if state.step:  # the dry run has measured the loss of a model that was trained
            plan = replace(plan, initial_loss=None)
    job.plan = first_of(world, plan)
    if rlimits() and free_bytes(torch.device("cpu")) > AMPLE * sum((job.plan.memory_bytes or {}).values()):
        keep_blocks()
    if not earlier:
        state.scaler = job.precision.scaler(device)
    job.plan = replace(job.plan, header=run_header(job, first, earlier))
    if loaded.within_s is not None:
        job.plan = replace(job.plan, ends_in_s=loaded.within_s)
    return job


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


def until_of(plan: Plan) -> Until:
    """How much of the run is used."""
    return for_steps(plan.extent.steps) if plan.extent.steps else for_seconds(plan.extent.seconds or 0.0)


def until_of_job(job: Job) -> Until:
    """As ``until_of``; where the whole run must be over at some time, its seconds are those of the clock."""
    if job.loaded.within_s is None:
        return until_of(job.plan)
    after_s = job.plan.seconds.get(LAST_EVALUATION, 0.0) + ENDING_S
    if is_watched(job):
        after_s += predicted_end_s(training_time_s(job.plan) or 0.0)
    return ByTheClock(job.loaded.within_s, after_s)


def _require_something_left(recipe: Recipe, plan: Plan, state: TrainState) -> None:
    """Raises UsageError when a resumed run has done all that it was asked for."""
    if until_of(plan)(state) >= 1.0:
        done = f"{state.step:,} steps in {state.elapsed_s:.4g} s, until: {recipe.until}"
        raise UsageError(f"the run has done what it was asked for ({done})", remedy=f"add {doubled(recipe.until)}")


def _after_dry_run(job: Job, facts: RunFacts, first: StepBatch, asked: str | None) -> Plan:
    """Returns the plan with what the first micro-batch showed: loss, time by precision and threads, activations."""
    one = replace(first, micro=(copy.deepcopy(first.micro[0]),))  # a model may write into its input
    together = job.world if job.divides_weights else SOLO
    seen = try_batch(job.state, one, job.parts.loss, job.precision_of, facts, asked, together)
    plan = job.plan
    if seen.mean:
        why = (
            "the loss returns a plain mean; tw.Loss(total, weight) counts exactly where padding or targets are ignored"
        )
        plan = replace(plan, notes=(*plan.notes, Note("loss", "weighted by batch size", why)))
    plan = replace(plan, notes=(*plan.notes, *memory_note(job.recipe, seen.optimizer_bytes)))
    share = tensor_share(job.parts.model, plan.degrees)
    average_bytes, buffer_bytes = _average_and_buffers_bytes(job.state)
    return with_dry_run(
        plan,
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
            shard=plan.degrees.shard,
            zero=job.recipe.parallel.zero,
        )
        | measured_state(job.recipe, seen.optimizer_bytes),
    )


def _left_of_epoch(plan: Plan, state: TrainState, batch_size: int) -> int:
    """Steps until the next epoch, whose order must not be drawn before the last step of this one is taken."""
    return (plan.steps_per_epoch or 0) - state.data.position // batch_size


def _average_and_buffers_bytes(state: TrainState) -> tuple[int, int]:
    """Bytes of the averaged weights, and of the buffers with the engine's copies of them, which undo a failed step."""
    average = locals_of(state.ema.shadow.values()) if isinstance(state.ema, WeightAverage) else []
    modules = [state.model, *([state.loss] if state.loss is not None else [])]
    sizes = {id(buffer): buffer.nbytes for module in modules for buffer in module.buffers()}.values()
    return sum(each.nbytes for each in average), sum(size * (2 if size <= LARGEST_TABLE else 1) for size in sizes)


def _tried(job: Job, facts: RunFacts, first: StepBatch, asked: str | None) -> Plan:
    """The plan with what the dry run measured; ``step_s`` is the time of a step without its data."""
    if job.parts.advance is not None:
        return untried(job.plan, job.recipe)
    if job.stages is not None:
        chosen, note = choose_precision(asked, facts.device, facts.low_precision, {})
        return replace(job.plan, precision=chosen, notes=(*job.plan.notes, note, NOT_TRIED))
    together = job.world if job.divides_weights else SOLO
    tried, why = job.plan, ""
    try:
        tried = _after_dry_run(job, facts, first, asked)
    except NotIsolated as error:
        why = f"the dry run would leave a trace: {error}"
    if not together.least(int(not why)):
        chosen, note = choose_precision(asked, facts.device, facts.low_precision, {})
        no_run = Note("dry run", "none", f"{why or 'another rank makes none'}; no times, no first loss")
        return replace(job.plan, precision=chosen, notes=(*job.plan.notes, note, no_run))
    plan = first_of(together, tried)  # ranks that compute together may time otherwise
    if not job.divides_weights:
        pace = peak_samples_s(job.parts, first.micro[0], known_device(job.device), plan.precision)
        job.peak_samples_s = pace and pace * job.world.size
    return plan


def _with_times(plan: Plan, job: Job, kept: Kept) -> Plan:
    """The plan with how long the run takes, and how much of the validation set is evaluated in its course."""
    if plan.step_s is None:
        return plan
    reading = job.reading
    notes = (*plan.notes, *reading.notes())
    plan = replace(plan, step_s=plan.step_s + reading.wait_s, wait_s=reading.wait_s, notes=notes)
    cost = job.evaluation_cost = _evaluation_cost(plan, job)
    if cost is not None and job.recipe.evaluation.batches is None and kept.evaluate_batches is None:
        within_s = job.loaded.within_s
        plan = replace(plan, evaluate_batches=affordable_batches(plan, cost, within_s))
        if within_s is not None and without_whole(plan, cost, within_s):
            plan = replace(plan, evaluates_whole=False)
        if plan.evaluate_batches:
            plan = replace(plan, notes=(*plan.notes, evaluation_note(plan, cost)))
    return replace(
        plan, seconds={**foretold(plan, cost, used=until_of(plan)(job.state)), **_of_examinations(plan, job)}
    )


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


def is_watched(job: Job) -> bool:
    """Whether the doctor watches and runs steps again: it cannot do so with a step of several ranks."""
    return job.recipe.log.doctor and job.world.size == 1


def _of_examinations(plan: Plan, job: Job) -> dict[str, float]:
    training_s = training_time_s(plan)
    if not is_watched(job) or not training_s or job.recipe.log.examine == "all":
        return {}
    return {EXAMINATIONS: predicted_from_start_s(training_s * (1 - until_of(plan)(job.state)))}


def spike_handler(loaded: Loaded) -> SpikeHandler:
    """What the recipe asks for at a spike of the gradient. To warn is not the step's: the doctor does."""
    policy = loaded.recipe.spikes.policy
    if policy in ("warn", "off"):
        return NO_SPIKES
    return SpikeGuard(policy if policy in SPIKE_POLICIES else find(policy, {}, "spikes.policy", loaded.source))  # type: ignore[arg-type]


def make_advance(
    job: Job,
    witness: StepWitness = SILENT,
    spikes: SpikeHandler = NO_SPIKES,
    keeper: OutputKeeper | None = None,
    probes: Sequence[Probe] = (),
) -> StepFn:
    """The step function of a job; sets the process-wide matmul mode and threads that its plan asks for."""
    job.matmul.set()
    torch.set_num_threads(job.plan.threads)
    if job.parts.advance is not None:
        return make_own_step(job.parts.advance, schedule=job.built.schedule, witness=witness, keeper=keeper)
    return make_step(
        job.parts.loss,
        schedule=job.built.schedule,
        precision=job.precision,
        clip=job.built.clip,
        probes=probes,
        ranks=rank_layout(job.parts, job.mesh, job.recipe.parallel, job.staged(job.plan.batch.micro), job.state),
        seed=job.recipe.seed,
        spikes=spikes,
        witness=witness,
        keeper=keeper,
    )
