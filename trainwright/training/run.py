"""Trains a run of the Trainwright engine, from a recipe to its result, in six stages.

    require_trainable    the recipe, with all of its problems reported at once
    find_earlier_part    the earlier part of the run, if it is resumed
    prepare              the plan and the live objects: a Job (prepare.py)
    enter_folder         the run folder, its lock and its metadata
    open_run             log, sinks, doctor, evaluation and saving (open_run.py), in which the engine trains
    finish               the result (result.py)

All ranks go through the same stages. The first rank decides and writes, the others receive its decisions.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.remote import require_writable
from trainwright.checkpoint.rng import preserved_rng
from trainwright.distributed import SOLO, Launch, World, joined
from trainwright.distributed.memory import adapt_to_limits, return_free_blocks
from trainwright.engine import loop
from trainwright.engine.loop import NEVER, StopRequest
from trainwright.engine.precision import MatmulMode
from trainwright.errors import StoppedError, StorageError, UsageError
from trainwright.finetune.generations import Generations
from trainwright.models.pretrained import pretrained_of
from trainwright.monitoring.alerts import require_channels
from trainwright.monitoring.evaluation import EvaluationListener
from trainwright.monitoring.progress import Progress
from trainwright.monitoring.signals import Signals, grace_s
from trainwright.monitoring.terminal import Console
from trainwright.plan.explain import preflight
from trainwright.recipe import Loaded, load, require_unmasked
from trainwright.recipe.resolve import is_live
from trainwright.report.pages.report import leave_report
from trainwright.report.server.serve import serve_in_background
from trainwright.runs.folder import RunFolder, ensure_identity
from trainwright.runs.lock import NoLock, RunLock
from trainwright.training.compile_mode import with_compile_mode
from trainwright.training.job import Job
from trainwright.training.layout import require_layout
from trainwright.training.open_run import (
    Extra,
    HeldFolder,
    OpenRun,
    Process,
    compares_ranks,
    measure_norms,
    open_run,
)
from trainwright.training.prepare import prepare
from trainwright.training.problems import all_problems_reported
from trainwright.training.result import Result, finish
from trainwright.training.resume import Earlier, find_earlier, follow_earlier, interrupted_run, unfinished_before
from trainwright.training.run_metadata import rewrite_metadata, write_metadata


def train(
    loaded: Loaded | str | Path,
    *,
    parts: Parts | None = None,
    resume: RunFolder | None = None,
    accept: Sequence[str] = (),
    console: Console | None = None,
    quiet: bool = False,
    extras: Sequence[Extra] = (),
    world: World = SOLO,
    serve: bool = False,
) -> Result:
    """Train a recipe from its first step, or from the newest checkpoint of ``resume``, to its end.

    Args:
        loaded: The recipe, or the path of its file.
        parts: Live objects that replace the objects named by the recipe.
        resume: The run folder to resume from.
        accept: Recipe paths of accepted differences to the earlier part of the run.
        console: The output; by default the terminal.
        quiet: Print nothing.
        extras: Functions that make further observers.
        world: The ranks. ``world.clock`` is the clock of a run whose length is in seconds.
        serve: Show the run in a browser while it trains.

    Returns:
        The result of the run.

    Raises:
        TrainwrightError: A mistake that the user can fix. The error names its remedy.
    """
    loaded = load(loaded) if isinstance(loaded, str | Path) else loaded
    if not isinstance(loaded, Loaded):
        raise UsageError(
            f"train: the recipe is a {type(loaded).__name__}",
            remedy="pass the path of its file, or for a dict trainwright.recipe.from_mapping(...)",
        )
    launch = Launch.read(os.environ)
    require_trainable(loaded, parts, launch.size)
    with process_of_run(loaded, parts, launch, world, console or Console(), quiet=quiet) as process:
        earlier = find_earlier_part(loaded, resume, accept, process)
        with nothing_to_save(process.signals):
            say = process.progress.say
            prepared = prepare(loaded, parts, earlier=earlier, world=process.world, launch=launch, say=say)
            job = with_compile_mode(prepared, earlier)
        place = enter_folder(job, earlier, process, serve=serve)
        with open_run(job, place, process, extras) as run:
            _evaluate_base(job, run, process)
            outcome = loop.run(
                job.state,
                run.batches,
                run.step,
                until=run.until,
                observers=run.observers,
                evaluation=run.evaluation or NEVER,
                saving=run.saving,
                world=process.world,
                complete=lambda _state: measure_norms(job, say),
            )
            process.world.least(0)  # wait for the save of the first rank: torchrun ends all ranks if one exits
            run.record_end(outcome, job.state)
        return finish(job, place, run, outcome, process)


def _evaluate_base(job: Job, run: OpenRun, process: Process) -> None:
    """Evaluate a pretrained model before its first step, as the baseline for fine-tuning."""
    if run.evaluation is None or job.state.step or pretrained_of(job.state.model) is None:
        return
    listeners: list[EvaluationListener] = []
    if run.reports is not None:
        listeners = [run.reports.logbook.recorder, process.progress]
    with nothing_to_save(process.signals):
        run.evaluation.before_training(job.state, listeners)
    for each in job.built.observers:
        if isinstance(each, Generations):
            each.show("the start")


def require_trainable(loaded: Loaded, parts: Parts | None, ranks: int) -> None:
    """Raise an error with all problems of the recipe, before the ranks wait for each other."""
    with all_problems_reported(loaded, parts, ranks):
        require_layout(loaded, parts, ranks)
        require_unmasked(loaded.recipe.model_dump(), "", loaded.source)
        require_channels(loaded.recipe.alerts)
        if loaded.recipe.checkpoint.copy_to is not None:
            require_writable(loaded.recipe.checkpoint.copy_to)


@contextmanager
def process_of_run(
    loaded: Loaded, parts: Parts | None, launch: Launch, world: World, console: Console, *, quiet: bool
) -> Iterator[Process]:
    """Join the ranks, handle signals and open the output. Restores the settings of the process afterwards."""
    recipe = loaded.recipe
    with (
        ExitStack() as listening,  # closed last: a signal without a handler would end the process during the cleanup
        process_settings(seeds=parts is None or parts.custom.generators is None),
        joined(launch, recipe.parallel.timeout.value, on_gpu=recipe.device != "cpu") as ranks,
    ):
        everyone = ranks if world is SOLO else world
        progress = Progress(console, quiet=quiet or everyone.rank > 0)
        signals = Signals(progress.say, recipe.checkpoint.signals, grace_s(os.environ), repeated=everyone.size > 1)
        with ExitStack() as closing:
            adapt_to_limits()
            closing.callback(return_free_blocks)  # what ``retain_blocks`` has kept
            closing.callback(progress.close)
            listening.callback(signals.close)
            signals.listen()
            yield Process(launch, everyone, progress, signals, closing)


def find_earlier_part(
    loaded: Loaded, resume: RunFolder | None, accept: Sequence[str], process: Process
) -> Earlier | None:
    """Return the part of the run that is resumed, with its folder locked; None for a new run.

    A run is also resumed if this launch began it before torchrun or the scheduler restarted the ranks.
    """
    if not process.is_first:
        with nothing_to_save(process.signals):
            mine: tuple[RunFolder | None, Path | None] | None = None
            agreed = process.world.agree(mine)
            assert agreed is not None
            folder, checkpoint = agreed
            return follow_earlier(folder, checkpoint, accept) if folder else None
    found = resume or unfinished_run(loaded, process.launch)
    lock = process.closing.enter_context(_locked(found, process.signals)) if found else None
    with nothing_to_save(process.signals):
        earlier = find_earlier(found, lock, accept) if found and lock else None
        process.world.agree((earlier.folder, earlier.checkpoint) if earlier else _NO_RESUME)
        return earlier


_NO_RESUME: tuple[RunFolder | None, Path | None] = (None, None)


def unfinished_run(loaded: Loaded, launch: Launch) -> RunFolder | None:
    """Return the run that this launch began before its ranks were restarted; None if there is none."""
    recipe = loaded.recipe
    return interrupted_run(Path(recipe.folder), recipe.name, launch) if launch.job else None


def enter_folder(job: Job, earlier: Earlier | None, process: Process, *, serve: bool) -> HeldFolder:
    """Return the run folder of a job. The first rank makes and locks it, and writes metadata and preflight to it."""
    if not process.is_first:
        agreed: RunFolder | None = process.world.agree(None)
        assert agreed is not None
        return HeldFolder(agreed, NoLock(), "", None)
    progress, say = process.progress, process.progress.say
    _show_plan(progress, job)
    folder = earlier.folder if earlier else RunFolder.create(job.recipe.folder, job.recipe.name)
    lock = earlier.lock if earlier else process.closing.enter_context(_locked(folder, process.signals))
    assert isinstance(lock, RunLock)
    (rewrite_metadata if earlier else write_metadata)(folder, job)
    process.closing.callback(leave_report, folder, say)
    audits = [line for audit in job.supervision for line in audit.lines()]
    for line in [*_notices(job, folder, lock, earlier), *preflight(job.plan, time.time()), *audits]:
        say(line)
    if serve:
        serve_in_background(folder, progress.print)
    process.world.agree(folder)
    return HeldFolder(folder, lock, ensure_identity(folder), earlier.checkpoint if earlier else None)


def _show_plan(progress: Progress, job: Job) -> None:
    """Pass epochs, reference losses and peak speed from the plan and the dry run to the progress line."""
    per_epoch, steps = job.plan.steps_per_epoch, job.plan.extent.steps
    progress.references, progress.peak_samples_s = job.marks, job.measured.peak_samples_s
    progress.has_epochs = per_epoch is not None
    progress.epochs = steps / per_epoch if steps and per_epoch and not job.plan.spent.step else None


def _notices(job: Job, folder: RunFolder, lock: RunLock, earlier: Earlier | None) -> Iterator[str]:
    """Yield what the user must know before the first step, besides the plan."""
    yield from earlier.messages if earlier else ()
    if not lock.exclusive:
        yield f"the file system of {folder.path} does not support locks: make sure that no other process trains there"
    if earlier:
        yield earlier.describe(job.state.step)
    elif not is_live(job.recipe.model.use):
        yield from unfinished_before(folder, job.recipe.name)
    if compares_ranks(job):
        yield "the doctor compares the ranks; checks that replay a step do not run with several ranks"
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("OMPI_COMM_WORLD_SIZE") or "1"
    if job.world.size == 1 and tasks != "1":
        yield f"each of the {tasks} tasks of srun or mpirun trains a run of its own; torchrun starts one run of all"


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


@contextmanager
def _locked(folder: RunFolder, signals: Signals) -> Iterator[RunLock]:
    """Hold the lock of a run folder. After an exception the lock still names the step in progress, as after a kill.

    The step is removed if it cannot be the cause: after a mistake in the call, a full disk, or a signal to stop.
    """
    lock = RunLock.acquire(folder.path)
    signals.on_received = lock.excuse
    try:
        yield lock
    except Exception as error:
        if isinstance(error, UsageError | StorageError):
            lock.forget_step()
        lock.release(clean=False)
        raise
    finally:
        lock.release(clean=True)


@contextmanager
def process_settings(*, seeds: bool = True) -> Iterator[None]:
    """Restore process settings that a run changes: torch's, and the random generators if the run ``seeds`` them.

    A run that does not seed the generators leaves them in their state after training, as a plain loop does. Within the
    block, a crash prints the Python stack.
    """
    names_crashes = faulthandler.is_enabled()
    if not names_crashes:
        enable_faulthandler()
    threads, matmul, benchmark = torch.get_num_threads(), MatmulMode.read(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with preserved_rng() if seeds else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        matmul.set()
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic)
        if not names_crashes:
            faulthandler.disable()


def enable_faulthandler() -> None:
    """Let a crash of this process print the Python stack, if standard error is a file."""
    with suppress(RuntimeError, OSError, ValueError, AttributeError):
        faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]
