"""A run before its first step: built, planned, rehearsed. Composition, like run.py, which takes it from here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from trainwright.build.assemble import (
    Parts,
    at_recipe,
    build_loading,
    build_parts,
    build_schedule,
    build_state,
    gather_facts,
    training_batches,
)
from trainwright.engine.clip import make_clip
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.engine.rehearse import Mode, rehearse
from trainwright.engine.step import Schedule, StepFn, make_step
from trainwright.errors import DataError, Problem, RecipeError
from trainwright.observe.sinks import require_sinks
from trainwright.plan.machine import Machine, read_machine
from trainwright.plan.make import Facts, Note, Plan, candidates, choose_precision, make_plan, with_rehearsal
from trainwright.plan.memory import memory_bytes
from trainwright.recipe import Loaded, Recipe
from trainwright.state.checkpoint import load_checkpoint
from trainwright.state.cursor import StepBatch
from trainwright.state.rng import seed_all, set_deterministic
from trainwright.state.train_state import TrainState
from trainwright.world import choose_device, device_name, low_precision, usable_threads


@dataclass
class Job:
    """All that a run needs, live and planned; nothing of it has been trained."""

    loaded: Loaded
    parts: Parts
    plan: Plan
    state: TrainState
    device: torch.device
    machine: Machine
    batches: Iterator[StepBatch]
    schedule: Schedule

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def precision(self) -> Precision:
        return Precision(self.plan.precision, self.device.type)

    @property
    def marks(self) -> dict[str, float]:
        """Reference losses that the training set knows of (uniform, unigram, bigram), else none."""
        references = getattr(self.parts.train.dataset, "references", None)
        known: dict[str, float] = references() if callable(references) else {}
        return {name: value for name, value in known.items() if not name.endswith("_val")}


@dataclass(frozen=True)
class Kept:
    """An earlier part of the same run: what it measured and chose stays, or the bits would change."""

    precision: PrecisionName
    threads: int
    checkpoint: Path


def prepare(loaded: Loaded, parts: Parts | None = None, *, kept: Kept | None = None) -> Job:
    """Builds, plans and rehearses; afterwards nothing has been trained and no random number drawn.

    The batch that is rehearsed is the first that will be trained on: a stream is read only once.
    """
    recipe, machine = loaded.recipe, read_machine()
    with at_recipe(loaded, "device"):
        device = choose_device(recipe.device)
    set_deterministic(recipe.deterministic)
    parts = parts or build_parts(loaded, device)
    threads = (kept.threads,) if kept else usable_threads(device)
    facts = gather_facts(parts, device, device_name(device, machine), low_precision(device, machine), threads)
    with at_recipe(loaded, ""):
        plan = make_plan(recipe, facts)
    state, schedule = build_state(parts, loaded, plan), build_schedule(loaded, plan)
    require_sinks(recipe.log.sinks)
    seed_all(recipe.seed)  # training draws the same numbers whatever was done to get here
    if kept:
        _require_same_precision(loaded, facts, kept)
        state.scaler = Precision(kept.precision, device.type).scaler(device)
        load_checkpoint(state, kept.checkpoint)
    batches = iter(training_batches(parts, build_loading(parts, recipe, plan, device), state.data))
    first = next(batches, None)
    if first is None:
        raise DataError("the training data gave no batch", remedy="check that it is not empty or used up")
    job = Job(loaded, parts, plan, state, device, machine, chain([first], batches), schedule)
    job.plan = _rehearsed(job, facts, first, kept.precision if kept else recipe.precision)
    if not kept:
        state.scaler = job.precision.scaler(device)
    return job


def _require_same_precision(loaded: Loaded, facts: Facts, kept: Kept) -> None:
    asked = loaded.recipe.precision
    if asked != "auto" and choose_precision(asked, facts.device, facts.low_precision, {})[0] != kept.precision:
        rule = f"the first part of the run computed in {kept.precision}, and a run keeps its precision"
        where = loaded.source.where("precision")
        raise RecipeError(Problem("precision", rule, got=asked, remedy="leave it out, or start anew", where=where))


def _rehearsed(job: Job, facts: Facts, first: StepBatch, asked: str) -> Plan:
    """The plan with what the first micro-batch showed: loss, time by precision and threads, activations."""
    one = replace(first, micro=(copy.deepcopy(first.micro[0]),))  # a model may write into its input
    names = candidates(asked, job.device.type, facts.low_precision)
    modes = [Mode(Precision(name, job.device.type), threads) for name in names for threads in facts.threads]
    seen = rehearse(job.state, one, job.parts.loss, modes=modes)
    plan = job.plan
    if seen.mean:
        why = "the loss returns a plain mean tensor; tw.Loss(total, weight) would count tokens exactly"
        plan = replace(plan, notes=(*plan.notes, Note("loss", "weighted by batch size", why)))
    return with_rehearsal(
        plan,
        asked=asked,
        facts=facts,
        loss=seen.loss,
        outputs=seen.outputs,
        seconds={mode: seconds * len(first.micro) for mode, seconds in seen.seconds.items()},
        memory_bytes=memory_bytes(
            job.recipe.optimizer.use,
            parameters=facts.parameters,
            trainable=facts.trainable,
            activations=seen.activation_bytes,
        ),
    )


def make_advance(job: Job) -> StepFn:
    """The step function of a job; sets the process-wide matmul mode and threads that its plan asks for."""
    clip = job.recipe.optimizer.clip
    job.precision.set_matmul_mode()
    torch.set_num_threads(job.plan.threads)
    return make_step(job.parts.loss, schedule=job.schedule, precision=job.precision, clip=make_clip(clip.by, clip.at))
