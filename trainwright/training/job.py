"""A run before its first step, and the function that trains a step. prepare.py makes it, run.py trains it."""

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
from trainwright.training.layout import rank_layout
from trainwright.training.own_objects import Live
from trainwright.watching.budget import predicted_end_s

ENDING_S = 0.5
"""About the time that the last save and the end of the process take."""


@dataclass(frozen=True)
class Hardware:
    """What this rank computes on. ``memory`` is the device as it was before the model was made."""

    machine: Machine
    device: torch.device
    memory: Device


@dataclass(frozen=True)
class Measured:
    """What was measured before the first step.

    Attributes:
        reading: How long a step waits for its data.
        evaluation_cost: Time of an evaluation, and its batches.
        peak_samples_s: Samples a second of all ranks together at the peak rate of their devices.
    """

    reading: ReadingPace = field(default_factory=ReadingPace)
    evaluation_cost: EvaluationCost | None = None
    peak_samples_s: float | None = None


@dataclass(frozen=True)
class Job:
    """All that a run needs, live and planned; nothing of it has been trained.

    ``accepted`` are the differences to an earlier part of the run that the user accepts.
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
    measured: Measured = field(default_factory=Measured)

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


def is_watched(job: Job) -> bool:
    """Whether the doctor watches and runs steps again: it cannot do so with a step of several ranks."""
    return job.recipe.log.doctor and job.world.size == 1


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
