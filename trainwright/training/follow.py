"""Trains on a rank other than the first. It follows the decisions of the first rank and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from trainwright.assembly.assemble import Parts
from trainwright.distributed import Launch, World
from trainwright.engine.loop import Outcome, StopRequest, run
from trainwright.engine.periodic import NEVER
from trainwright.engine.witness import SILENT
from trainwright.errors import StoppedError
from trainwright.monitoring.evaluation import PeriodicEvaluation
from trainwright.monitoring.log_window import LogWindow, NotLogging
from trainwright.monitoring.saving_together import SavingTogether
from trainwright.monitoring.signals import Signals
from trainwright.recipe import Loaded
from trainwright.runs.folder import RunFolder
from trainwright.training.compare import make_ranks_observer
from trainwright.training.complete import measure_norms
from trainwright.training.evaluation import every, periodic_evaluation
from trainwright.training.job import Job, make_advance, spike_handler, until_of
from trainwright.training.layers import layer_observers
from trainwright.training.prepare import prepare
from trainwright.training.resume import follow_earlier, interrupted_run

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """The request for a run and the ranks that take part.

    Attributes:
        loaded: The recipe.
        parts: Live objects instead of those that the recipe names.
        resume: The run folder to resume from.
        accept: Recipe paths of accepted differences to the earlier part of the run.
        launch: How this process was started.
        world: All ranks.
        serve: True if the first rank shows the run in a browser.
    """

    loaded: Loaded
    parts: Parts | None
    resume: RunFolder | None
    accept: tuple[str, ...]
    launch: Launch
    world: World
    serve: bool = False


class ResumedFrom(NamedTuple):
    """The run folder and checkpoint that the first rank resumes; ``folder`` is None for a new run."""

    folder: RunFolder | None
    checkpoint: Path | None = None


NO_RESUME = ResumedFrom(None)


class Followed(NamedTuple):
    """A run that ended on a rank other than the first."""

    job: Job
    folder: RunFolder
    outcome: Outcome
    evaluation: PeriodicEvaluation | None


def unfinished_run(start: Start) -> RunFolder | None:
    """Return the run that this launch began before torchrun or the scheduler restarted the ranks; None if there is
    none.
    """
    if not start.launch.job:
        return None
    recipe = start.loaded.recipe
    return interrupted_run(Path(recipe.folder), recipe.name, start.launch)


def follow(start: Start, signals: Signals) -> Followed:
    """Take part in a run from its preparation to its last step."""
    world = start.world
    with nothing_to_save(signals):
        found = receive_agreed(world, ResumedFrom)
        earlier = follow_earlier(found.folder, found.checkpoint, start.accept) if found.folder else None
        job = prepare(start.loaded, start.parts, earlier=earlier, world=world, launch=start.launch)
    folder = receive_agreed(world, RunFolder)
    evaluation = periodic_evaluation(job)
    gives_parts = job.divides_weights or job.state.saves_together
    saving = SavingTogether(world, stages=job.mesh.stages_of_first) if gives_parts else NEVER
    if job.accepted:
        saving(job.state)
    doctor = make_ranks_observer(job, folder)
    layers = tuple(layer_observers(job))
    witness, probes = doctor.witness if doctor else SILENT, [each.probe for each in layers]
    every_record = every(job.plan.log_every, job.state) if job.mesh.sums.size > 1 else None
    window = LogWindow(job.built.train_metrics, job.mesh.sums, every_record)
    with window.collecting():
        outcome = run(
            job.state,
            job.batches,
            make_advance(job, witness, spike_handler(job.loaded), window.keeper, probes),
            until=until_of(job.plan),
            observers=(window, *([NotLogging(doctor)] if doctor else []), *layers, signals),
            evaluation=evaluation or NEVER,
            saving=saving,
            world=world,
            complete=lambda state: measure_norms(job),
        )
    world.least(0)  # wait until the first rank has saved: torchrun ends all ranks when one exits
    return Followed(job, folder, outcome, evaluation)


def receive_agreed(world: World, kind: type[T]) -> T:
    """Return the object that the first rank sends."""
    mine: T | None = None
    agreed = world.agree(mine)
    assert isinstance(agreed, kind)
    return agreed


@contextmanager
def nothing_to_save(signals: Signals) -> Iterator[None]:
    """Let a signal end the block at once. Raises StoppedError, or KeyboardInterrupt for SIGINT."""
    try:
        with signals.at_once("ending now, before the first step"):
            yield
    except StopRequest as asked:
        if asked.stop.reason == "SIGINT":
            raise KeyboardInterrupt from None
        raise StoppedError(f"{asked.stop.reason} came before the first step: nothing was trained or saved") from None
