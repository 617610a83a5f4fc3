"""A run before its first step, and its step function. prepare.py makes the job and run.py trains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainwright.assembly.assemble import Parts, draws_as_a_loop, is_live
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed import ONE, RankMesh, World
from trainwright.engine.manual_step import make_own_step
from trainwright.engine.metrics import OutputKeeper
from trainwright.engine.precision import MatmulMode, Precision, PrecisionName
from trainwright.engine.run_length import ByTheClock, Until, for_seconds, for_steps
from trainwright.engine.spikes import NO_SPIKES, SpikeGuard, SpikeHandler
from trainwright.engine.stage_passes import PipelineStages, StagedPasses
from trainwright.engine.step import Probe, StepFn, make_step
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.plan.devices import Device
from trainwright.plan.machine import Machine
from trainwright.plan.make import Plan
from trainwright.plan.reading import ReadingPace
from trainwright.plan.run_time import LAST_EVALUATION, EvaluationCost, training_time_s
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.catalog import SPIKE_POLICIES
from trainwright.recipe.resolve import find
from trainwright.runs.supervision import Supervision
from trainwright.training.custom_objects import Live
from trainwright.training.layout import rank_layout
from trainwright.watching.budget import predicted_end_s

ENDING_S = 0.5
"""Estimated seconds for the last save and the end of the process."""


@dataclass(frozen=True)
class Hardware:
    """The hardware of this rank. ``memory`` was measured before the model was built."""

    machine: Machine
    device: torch.device
    memory: Device


@dataclass(frozen=True)
class Measurements:
    """Measurements from before the first step.

    Attributes:
        reading: The time that a step waits for its data.
        evaluation_cost: Time of an evaluation, and its number of batches.
        peak_samples_s: Samples per second of all ranks together at the peak rate of their devices.
    """

    reading: ReadingPace = field(default_factory=ReadingPace)
    evaluation_cost: EvaluationCost | None = None
    peak_samples_s: float | None = None


@dataclass(frozen=True)
class Job:
    """Everything that a run needs, planned and built, before the first step.

    Attributes:
        loaded: The recipe.
        parts: Model, data sets and loss.
        plan: The plan.
        built: State, schedule, observers, metrics and gradient clipping.
        hardware: The machine and the device of this rank.
        batches: The stream of training batches.
        provenance: Code, packages, machine, data and seeds of this process.
        matmul: Process-wide precision of matrix multiplications.
        accepted: Recipe paths of differences to the earlier part of the run that the user accepted.
        mesh: The ranks by axis of parallelism.
        stages: The stages of a pipeline; None without one.
        measured: Measurements of the dry run.
        supervision: Which tokens or pixels of the data carry loss.
    """

    loaded: Loaded
    parts: Parts
    plan: Plan
    built: Live
    hardware: Hardware
    batches: Iterator[StepBatch]
    provenance: dict[str, Any]
    matmul: MatmulMode
    accepted: list[str] = field(default_factory=list)
    mesh: RankMesh = ONE
    stages: PipelineStages | None = None
    measured: Measurements = field(default_factory=Measurements)
    supervision: tuple[Supervision, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.hardware.device

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
        """True if a rank has only a part of the weights or sequences, so that all ranks must join each computation."""
        degrees = self.plan.degrees
        return degrees.ranks > degrees.replicate

    def staged(self, rows: int) -> StagedPasses | None:
        """Return the passes through the stages of a pipeline for at most ``rows`` samples; None without a pipeline."""
        return None if self.stages is None else StagedPasses(self.stages, self.mesh.stages, rows)

    @property
    def live(self) -> bool:
        """True if the model was passed in Python, so that no file can build it."""
        return is_live(self.recipe)

    @property
    def is_only_in_python(self) -> bool:
        """True for live objects that no recorded function makes. Only the original script can resume such a run."""
        return self.live and not self.parts.rebuild.get("function")

    @property
    def draws_as_a_loop(self) -> bool:
        """True if the user's DataLoader draws from the generators of the process, as in a plain loop over it."""
        return draws_as_a_loop(self.parts, self.recipe, self.plan)

    @property
    def lr(self) -> float:
        """The base learning rate of the first parameter group."""
        assert self.plan.lr is not None, "set when the optimizer is built"
        return self.plan.lr

    @property
    def precision(self) -> Precision:
        return self.precision_of(self.plan.precision)

    def precision_of(self, name: PrecisionName) -> Precision:
        """Return the precision with this name on the device of this rank."""
        return Precision(name, self.device.type, caches=not self.divides_weights)

    @property
    def marks(self) -> dict[str, float]:
        """Reference losses of the training set (uniform, unigram, bigram) by name; empty if it has none."""
        references = getattr(self.parts.train.dataset, "references", None)
        known: dict[str, float] = references() if callable(references) else {}
        return {name: value for name, value in known.items() if not name.endswith("_val")}


def until_of(plan: Plan) -> Until:
    """Return the function that gives the completed fraction of the run."""
    return for_steps(plan.extent.steps) if plan.extent.steps else for_seconds(plan.extent.seconds or 0.0)


def until_of_job(job: Job) -> Until:
    """Return the completed fraction as ``until_of`` does, or by wall-clock time if the run has a time limit."""
    if job.loaded.within_s is None:
        return until_of(job.plan)
    after_s = job.plan.seconds.get(LAST_EVALUATION, 0.0) + ENDING_S
    if is_watched(job):
        after_s += predicted_end_s(training_time_s(job.plan) or 0.0)
    return ByTheClock(job.loaded.within_s, after_s)


def is_watched(job: Job) -> bool:
    """Return True if the doctor watches this run and replays steps. It cannot replay a step of several ranks."""
    return job.recipe.log.doctor and job.world.size == 1


def spike_handler(loaded: Loaded) -> SpikeHandler:
    """Return the handler of gradient spikes. For the policy ``warn`` the doctor reports them, not the step."""
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
    """Return the step function of a job. Also sets the process-wide matmul precision and number of threads."""
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
