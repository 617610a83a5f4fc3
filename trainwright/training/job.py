"""The Job: a run before its first step, with the plan, the live objects and the measurements of the dry run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from trainwright.assembly.assemble import (
    Parts,
    draws_as_a_loop,
)
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed import ONE, RankMesh, World
from trainwright.engine.graphs import CudaGraphs, StepGraphs
from trainwright.engine.loop import ByTheClock, Until, for_seconds, for_steps
from trainwright.engine.manual_step import make_own_step
from trainwright.engine.metrics import OutputKeeper
from trainwright.engine.precision import MatmulMode, Precision, PrecisionName
from trainwright.engine.spikes import NO_SPIKES, SpikeHandler
from trainwright.engine.stage_passes import PipelineStages, StagedPasses
from trainwright.engine.step import Probe, StepFn, make_step
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.plan.devices import Device
from trainwright.plan.machine import Machine
from trainwright.plan.make import Plan
from trainwright.plan.run_time import (
    LAST_EVALUATION,
    EvaluationCost,
    ReadingPace,
    training_time_s,
)
from trainwright.plan.trace.local_device import known_device
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.resolve import is_live
from trainwright.runs.reader import UNUSED, Usage
from trainwright.runs.supervision import Supervision
from trainwright.training.budget import energy_meter, for_energy
from trainwright.training.custom_objects import Live
from trainwright.training.layout import rank_layout
from trainwright.watching.budget import DOCTOR_VARIABLE, predicted_end_s

ENDING_S = 0.5
"""Estimated seconds for the last save and the end of the process."""


@dataclass(frozen=True)
class Hardware:
    """The hardware of this rank. ``memory`` was measured before the model was built."""

    machine: Machine
    device: torch.device
    memory: Device

    def gpu_indices(self) -> tuple[int, ...]:
        """Return the NVML index of the GPU of this rank; () on a CPU."""
        gpus = self.machine.gpus
        place = self.device.index or 0
        return (gpus[place].index,) if self.device.type == "cuda" and place < len(gpus) else ()


@dataclass(frozen=True)
class Measurements:
    """Measurements from before the first step.

    Attributes:
        reading: The time that a step waits for its data.
        evaluation_cost: Seconds per batch of an evaluation, and the number of batches of the last evaluation.
        peak_samples_s: Samples per second of all ranks together at the peak rate of their devices.
    """

    reading: ReadingPace = field(default_factory=ReadingPace)
    evaluation_cost: EvaluationCost | None = None
    peak_samples_s: float | None = None


@dataclass(frozen=True)
class Job:
    """Everything that a run needs, planned and built, before the first step.

    Attributes:
        hardware: The machine and the device of this rank.
        provenance: Code, packages, machine, data and seeds of this process.
        matmul: Process-wide precision of matrix multiplications.
        accepted: Recipe paths at which the user accepted a difference to the earlier part of the run.
        supervision: Which tokens or pixels of the data carry loss.
        used: Time and energy of earlier processes of the run, if its cost is known.
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
    used: Usage = UNUSED

    @property
    def device(self) -> torch.device:
        return self.hardware.device

    @cached_property
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

    @property
    def replays_ranks(self) -> bool:
        """True if ranks with full copies of the model replay each other's steps, to check that the bits are equal."""
        parallel, degrees = self.recipe.parallel, self.plan.degrees
        are_copies = has_doctor(self) and 1 < degrees.ranks == degrees.replicate
        is_alone = parallel.exact or parallel.sync_batchnorm or self.parts.custom.advance is not None
        return self.recipe.deterministic and are_copies and not is_alone

    @property
    def saves_together(self) -> bool:
        """True if all ranks must take part in a save."""
        return self.divides_weights or self.state.is_divided

    def staged(self, rows: int) -> StagedPasses | None:
        """Return the passes through the stages of a pipeline for at most ``rows`` samples; None without a pipeline."""
        return None if self.stages is None else StagedPasses(self.stages, self.mesh.stages, rows)

    @property
    def live(self) -> bool:
        """True if the model was passed in Python, so that no file can build it."""
        return is_live(self.recipe.model.use)

    @property
    def is_only_in_python(self) -> bool:
        """True if objects were passed in Python and no function that makes them is recorded.

        Only the original script can resume such a run.
        """
        return self.live and not self.parts.custom.rebuild.get("function")

    @property
    def draws_as_a_loop(self) -> bool:
        """True if the user's DataLoader draws from the generators of the process, as in a plain loop over it."""
        return draws_as_a_loop(self.parts, self.plan, exact=self.loaded.recipe.parallel.exact)

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
    """Return the function as ``until_of`` does, or one for a run with a limit on energy or wall-clock time."""
    if (limit := job.loaded.cost) is not None and limit.unit == "kWh":
        meter, before_kwh = energy_meter(job.hardware.gpu_indices()), job.used.kwh
        return for_energy(limit.value, lambda: before_kwh + meter())
    if job.loaded.within_s is None:
        return until_of(job.plan)
    after_s = job.plan.predicted.seconds.get(LAST_EVALUATION, 0.0) + ENDING_S
    if is_watched(job):
        after_s += predicted_end_s(training_time_s(job.plan) or 0.0)
    return ByTheClock(job.loaded.within_s, after_s)


def is_watched(job: Job) -> bool:
    """Return True if the doctor watches this run and replays steps; False on several ranks, where it cannot replay."""
    return has_doctor(job) and job.world.size == 1


def has_doctor(job: Job) -> bool:
    """Return True if a doctor watches this run, or compares its ranks."""
    is_asked_for = not job.loaded.stated.isdisjoint(("log.doctor", "log.examine"))
    return job.recipe.log.doctor and (is_asked_for or os.environ.get(DOCTOR_VARIABLE) != "off")


def make_advance(
    job: Job,
    witness: StepWitness = SILENT,
    spikes: SpikeHandler = NO_SPIKES,
    keeper: OutputKeeper | None = None,
    probes: Sequence[Probe] = (),
    graphs: StepGraphs | None = None,
) -> StepFn:
    """Return the step function of a job. Also sets the process-wide matmul precision and number of threads."""
    job.matmul.set()
    torch.set_num_threads(job.plan.threads)
    if job.parts.custom.advance is not None:
        return make_own_step(job.parts.custom.advance, schedule=job.built.schedule, witness=witness, keeper=keeper)
    return make_step(
        job.parts.loss,
        schedule=job.built.schedule,
        precision=job.precision,
        clip=job.built.clip,
        probes=probes,
        ranks=rank_layout(job.parts, job.mesh, job.recipe.parallel, job.staged(job.plan.batch.micro)),
        seed=job.recipe.seed,
        spikes=spikes,
        witness=witness,
        keeper=keeper,
        graphs=graphs,
    )


def step_graphs(
    job: Job, report: Callable[[str], None], runs_eagerly: Callable[[TrainState], bool] = lambda _state: False
) -> StepGraphs | None:
    """Return the object that captures the steps of a job in CUDA graphs; None if the job does not use graphs.

    ``report`` gets the reason if graphs cannot be used.
    """
    ask = job.recipe.graphs
    if ask is False:
        return None
    if job.device.type != "cuda":
        if ask is True:
            report("the run is on a CPU, which has no graphs")
        return None
    if job.parts.custom.advance is not None:
        report("a custom step (advance) is Python code of which nothing is known")
        return None
    return StepGraphs(CudaGraphs(job.device), ask == "auto", runs_eagerly, report)


def usd_per_hour(job: Job) -> float | None:
    """Return the price of the devices of the run in US dollars per hour: by the recipe, or by the table of devices."""
    known = known_device(job.device)
    price = job.recipe.price or (None if known is None else known.price)
    return None if price is None else price * job.world.size
