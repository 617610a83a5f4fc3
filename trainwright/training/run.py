"""Composes a run of the Trainwright engine: from a recipe to a trained model in one run folder."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.rng import preserved_rng
from trainwright.checkpoint.store import Retention
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed import SOLO, Launch, World, joined
from trainwright.distributed.memory import adapt_to_limits
from trainwright.engine.loop import Outcome, run
from trainwright.engine.observer import Observer
from trainwright.engine.periodic import NEVER
from trainwright.engine.precision import MatmulMode
from trainwright.engine.witness import SILENT
from trainwright.errors import StorageError, UsageError
from trainwright.monitoring.alerts.setup import alerting, require_channels
from trainwright.monitoring.end_time import EndTime
from trainwright.monitoring.evaluation import PeriodicEvaluation
from trainwright.monitoring.heartbeat import Heartbeat
from trainwright.monitoring.log_window import LogWindow, NotLogging
from trainwright.monitoring.logbook import Logbook
from trainwright.monitoring.progress import Progress
from trainwright.monitoring.remaining import TimeSpent
from trainwright.monitoring.saving import MIN_FRACTION_SAVE_INTERVAL_S, SavePolicy, Saving
from trainwright.monitoring.saving_together import SavingTogether
from trainwright.monitoring.signals import Signals, grace_s
from trainwright.monitoring.sinks.factories import sink_factories
from trainwright.monitoring.terminal import Console
from trainwright.plan.explain import describe_corrected_end, preflight
from trainwright.recipe import Loaded, require_unmasked
from trainwright.report.findings import exit_code
from trainwright.report.pages.report import leave_report
from trainwright.report.server.serve import serve_in_background
from trainwright.report.text import Ending, closing
from trainwright.runs.folder import RunFolder
from trainwright.runs.identity import ensure_identity
from trainwright.runs.lock import RunLock
from trainwright.runs.records import Ended, Found, RunVerdict
from trainwright.training.compare import compares_ranks, make_ranks_observer
from trainwright.training.complete import measure_norms
from trainwright.training.evaluation import every, periodic_evaluation
from trainwright.training.follow import NO_RESUME, ResumedFrom, Start, follow, nothing_to_save, unfinished_run
from trainwright.training.job import Job, is_watched, make_advance, spike_handler, until_of_job
from trainwright.training.layers import layer_observers
from trainwright.training.layout import require_layout
from trainwright.training.prepare import prepare
from trainwright.training.problems import all_problems_reported
from trainwright.training.restore import restore_best
from trainwright.training.result import Result
from trainwright.training.resume import Earlier, doubled_length, find_earlier, resume_command
from trainwright.training.run_metadata import folder_guard, rewrite_metadata, run_metadata, write_metadata
from trainwright.training.time_left import seconds_left
from trainwright.training.verdict import verdict_on
from trainwright.version import __version__
from trainwright.watching.engine import EngineObserver

Extra = Callable[[Job, RunFolder, Progress], Observer]
"""Makes a further observer of a run after everything else of it is built."""


@dataclass(frozen=True)
class Stage:
    """Everything a run needs besides its job: folder, lock, identity, output, signals, ranks, and any earlier part."""

    folder: RunFolder
    lock: RunLock
    identity: str
    progress: Progress
    signals: Signals
    world: World
    earlier: Earlier | None = None


def train(
    loaded: Loaded,
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
        loaded: The recipe.
        parts: Live objects instead of those that the recipe names.
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
    launch = Launch.read(os.environ)
    with all_problems_reported(loaded, parts, launch.size):
        require_layout(loaded, parts, launch.size)  # before the ranks wait for each other
        require_unmasked(loaded.recipe.model_dump(), "", loaded.source)
        require_channels(loaded.recipe.alerts)
    with (
        ExitStack() as listening,  # handles signals until all else is undone: by default they end the process
        process_settings(seeds=parts is None or parts.generators is None),
        joined(launch, loaded.recipe.parallel.timeout.value, on_gpu=loaded.recipe.device != "cpu") as ranks,
    ):
        world = ranks if world is SOLO else world
        progress = Progress(console or Console(), quiet=quiet or world.rank > 0)
        signals = Signals(progress.say, loaded.recipe.checkpoint.signals, grace_s(os.environ), repeated=world.size > 1)
        with ExitStack() as closing_down:
            adapt_to_limits()
            closing_down.callback(progress.close)
            listening.callback(signals.close)
            signals.listen()
            start = Start(loaded, parts, resume, tuple(accept), launch, world, serve)
            if world.rank > 0:
                result = Result.of_follower(follow(start, signals))
            else:
                result = _lead(start, progress, signals, closing_down, extras)
            return replace(result, interrupted_by=signals.received_name or result.interrupted_by)


def _lead(
    start: Start, progress: Progress, signals: Signals, closing_down: ExitStack, extras: Sequence[Extra]
) -> Result:
    """Run on the first (or only) rank, which makes the decisions and writes the run folder."""
    world, lines = start.world, list[str]()
    resume = start.resume or unfinished_run(start)
    lock = closing_down.enter_context(_locked(resume, signals)) if resume else None
    with nothing_to_save(signals):
        earlier = find_earlier(resume, lock, start.accept, lines.append) if resume and lock else None
        world.agree(ResumedFrom(earlier.folder, earlier.checkpoint) if earlier else NO_RESUME)
        job = prepare(start.loaded, start.parts, earlier=earlier, world=world, launch=start.launch, say=progress.say)
    progress.references, progress.peak_samples_s = job.marks, job.measured.peak_samples_s
    per_epoch, steps = job.plan.steps_per_epoch, job.plan.extent.steps
    progress.has_epochs = per_epoch is not None
    progress.epochs = steps / per_epoch if steps and per_epoch and not job.plan.spent.step else None
    folder = resume or RunFolder.create(job.recipe.folder, job.recipe.name)
    lock = lock or closing_down.enter_context(_locked(folder, signals))
    if not lock.exclusive:
        lines.append(
            f"the file system of {folder.path} does not support locks: make sure that no other process trains there"
        )
    (rewrite_metadata if earlier else write_metadata)(folder, job)
    closing_down.callback(leave_report, folder, progress.say)
    if earlier:
        lines.append(earlier.describe(job.state.step))
    if compares_ranks(job):
        lines.append("the doctor compares the ranks; it does not replay steps of several ranks")
    audits = [line for audit in job.supervision for line in audit.lines()]
    for line in [*lines, *preflight(job.plan, time.time()), *audits]:
        progress.say(line)
    if start.serve:
        serve_in_background(folder, progress.print)
    world.agree(folder)
    return _run(job, Stage(folder, lock, ensure_identity(folder), progress, signals, world, earlier), extras)


@contextmanager
def _locked(folder: RunFolder, signals: Signals) -> Iterator[RunLock]:
    """Hold the lock of a run folder. After an exception the lock keeps the step, as after a kill.

    The step is removed if it is not at fault: for a mistake in the call, a full disk, or a signal to stop.
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
    """Restore process settings that a run changes: those of torch, and the random generators if the run ``seeds`` them.

    A run that does not seed them leaves them in their state after training, as a plain loop does. Within the block, a
    crash prints the Python stack.
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


def _run(job: Job, stage: Stage, extras: Sequence[Extra]) -> Result:
    plan = job.plan
    state = job.state
    folder = stage.folder
    progress = stage.progress
    signals = stage.signals
    logbook = Logbook(
        folder,
        every(plan.log_every, state),
        sinks=sink_factories(job.recipe.log.sinks),
        config=job.recipe.model_dump(mode="json"),
        state=state,
        gpu_indices=[gpu.index for gpu in job.hardware.machine.gpus] if job.device.type == "cuda" else [],
        by_the_clock=plan.extent.seconds is not None,
        warn=progress.say,
    )
    with alerting(job.recipe.alerts, folder, progress.say) as alerts, logbook:
        restored = stage.earlier.checkpoint if stage.earlier else None
        heartbeat = Heartbeat(stage.lock, state)
        logbook.start(__version__, restored, stage.lock.died_in_step, job.accepted, plan.header.in_words())
        saving = _saving(job, stage, logbook)
        signals.saving_s, signals.newest = lambda: saving.last_s, lambda: str(saving.last or restored)
        alone = stage.world.size == 1
        doctor = (
            make_engine_observer(job, folder, progress.say)
            if is_watched(job)
            else make_ranks_observer(job, folder, logbook.journal.write, progress.say)
        )
        if doctor:
            progress.findings = doctor.findings
        is_reported = isinstance(doctor, EngineObserver)
        evaluation = periodic_evaluation(job, (logbook.recorder, stage.progress, saving), is_reported=is_reported)
        spent = TimeSpent(lambda: doctor.seconds if doctor else 0.0)

        def left_s(state: TrainState) -> float | None:
            measured = spent.measured()
            return None if measured is None else seconds_left(job, measured, state, until, saving.last_s)

        progress.left_s = left_s
        watching: tuple[Observer, ...] = (logbook.recorder, logbook.telemetry, spent, progress)
        watching += tuple(_end_time(job, progress))

        def judge(ended: Ended) -> RunVerdict:
            return verdict_on(
                job,
                folder,
                ended,
                logbook.recorder,
                findings=doctor.findings() if doctor else (),
                examined=doctor is not None,
                saved=ended.ending == "failed" or is_saved(saving.last, ended.step),
            )

        logbook.judge = judge
        extra = [
            *([NotLogging(doctor)] if doctor else []),
            *job.built.observers,
            *(make(job, folder, progress) for make in extras),
        ]
        witness = doctor.witness if doctor else SILENT
        every_record = every(plan.log_every, state) if job.mesh.sums.size > 1 else None
        window = LogWindow(job.built.train_metrics, job.mesh.sums, every_record)
        logbook.recorder.window = window.values
        layers = tuple(layer_observers(job, logbook))
        probes = [each.probe for each in layers]
        advance = make_advance(job, witness, spike_handler(job.loaded), window.keeper, probes)
        listening: AbstractContextManager[None] = nullcontext()
        if isinstance(doctor, EngineObserver):
            advance, listening = doctor.around(advance), doctor.listening()
        batches = signals.batches(job.batches) if alone else job.batches  # other ranks would wait for a stopped one
        saver = SavingTogether(stage.world, saving) if job.divides_weights or state.saves_together else saving
        with listening, _checkpoint_note(job, folder, saving), window.collecting():
            until = until_of_job(job)  # starts its clock
            if job.accepted:  # after a kill before the next save, the differences would have to be accepted again
                saver(state)
            outcome = run(
                state,
                batches,
                advance,
                until=until,
                observers=(window, *watching, *extra, *alerts, *layers, signals, heartbeat),
                evaluation=evaluation or NEVER,
                saving=saver,
                world=stage.world,
                complete=lambda state: measure_norms(job, progress.say),
            )
        stage.world.least(0)  # everything is saved: the other ranks may exit
        logbook.recorder.record_skipped(state)
        logbook.ended = _ended(outcome, evaluation, logbook)
    findings = tuple(doctor.findings()) if doctor else ()
    result = _close(job, stage, outcome, logbook, saving.last, findings)
    return replace(result, restored=restore_best(job, folder, progress.say))


def _end_time(job: Job, progress: Progress) -> Iterator[EndTime]:
    """Yield the observer of the predicted end, if the run has no time limit and a step was timed."""
    predicted_s = job.plan.step_s
    if predicted_s is not None and job.loaded.within_s is None:
        yield EndTime(
            progress.left_s,
            lambda step_s, left_s, now_s: describe_corrected_end(step_s, predicted_s, left_s, now_s),
            progress.say,
        )


def make_engine_observer(job: Job, folder: RunFolder, say: Callable[[str], None]) -> EngineObserver:
    """Return the doctor of a run. Its ``witness`` goes into the step function, which ``around`` wraps."""
    return EngineObserver(
        job.state,
        folder=folder,
        say=say,
        examine=job.recipe.log.examine,
        accumulation=job.plan.batch.accumulation,
        keeps_last_steps=job.is_only_in_python,  # a recipe can train any step again
        finds_spikes=job.recipe.spikes.policy == "warn",
        dataset=job.parts.train.origin,
    )


def _saving(job: Job, stage: Stage, logbook: Logbook) -> Saving:
    plan, ask = job.plan, job.recipe.checkpoint
    policy = SavePolicy(
        every(plan.save_every, job.state) if plan.save_every else None,
        MIN_FRACTION_SAVE_INTERVAL_S if ask.every is not None and ask.every.unit == "run" else 0.0,
        ask.at_least_every.value if ask.at_least_every else None,
        Retention(ask.keep, plan.keep_every),
        ask.best,
        ask.best_mode == "max",
        plan.evaluate_batches,
        ask.asynchronous,
    )
    return Saving(
        stage.folder.checkpoints,
        policy,
        listener=logbook.recorder,
        warn=stage.progress.say,
        run_metadata=run_metadata(job),
        run=stage.identity,
        folder_guard=folder_guard(stage.folder, job, stage.lock, stage.identity, stage.progress.say),
        clock=stage.world.clock if stage.world.size == 1 else time.monotonic,  # other ranks have no say in it
    )


@contextmanager
def _checkpoint_note(job: Job, folder: RunFolder, saving: Saving) -> Iterator[None]:
    """Add the newest checkpoint and the command that resumes from it to an exception."""
    try:
        yield
    except Exception as error:
        if saving.last:
            error.add_note(
                f"saved as {saving.last}; to resume after the fix: {resume_command(folder, live=job.is_only_in_python)}"
            )
        raise


def _ended(outcome: Outcome, evaluation: PeriodicEvaluation | None, logbook: Logbook) -> Ended:
    seen = evaluation.last if evaluation else None
    return Ended(
        time_s=time.time(),
        ending=outcome.ending,
        reason=outcome.stop.reason if outcome.stop else "",
        step=outcome.step,
        loss=float(outcome.last.loss) if outcome.last else None,
        val_loss=seen.loss if seen else None,
        skipped=logbook.recorder.num_skipped,
        seconds=logbook.seconds,
    )


def _close(
    job: Job, stage: Stage, outcome: Outcome, logbook: Logbook, saved: Path | None, findings: tuple[Found, ...]
) -> Result:
    """Print how the run ended and return the result."""
    folder, progress = stage.folder, stage.progress
    progress.close()
    ended, recorder = logbook.ended, logbook.recorder
    assert ended is not None
    is_whole = is_saved(saved, outcome.step)
    ending = Ending(
        ended,
        folder.path,
        recorder.last_evaluated,
        saved=is_whole,
        again=resume_command(folder, live=job.is_only_in_python),
        longer="" if job.is_only_in_python else doubled_length(job.recipe.until),
    )
    for line in closing(ending):
        progress.say(line)
    return Result(
        folder.path,
        ended.ending,
        ended.reason,
        ended.step,
        ended.loss,
        ended.val_loss,
        ended.skipped,
        ((outcome.stop.exit_code if outcome.stop else 0) or exit_code(findings)) if is_whole else 1,
        dict(ending.evaluated.metrics) if ending.evaluated else {},
        job.state,
        findings,
        interrupted_by=outcome.stop.reason if outcome.stop and outcome.stop.by_signal else "",
        loss_fn=job.parts.loss,
        metric_set=job.built.metrics,
        verdict=ended.verdict,
    )


def is_saved(newest: Path | None, step: int) -> bool:
    """Return True if the newest checkpoint is that of this step."""
    return newest is not None and newest.name == f"step-{step:08d}"
