"""Opens everything around the steps of a run: log, sinks, alerts, doctor, evaluation, saving, layer statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from trainwright.checkpoint.average import Swa
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.store import Retention
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed import Launch, World
from trainwright.engine.average_norms import measure_norms_of
from trainwright.engine.loop import Outcome
from trainwright.engine.observer import Observer
from trainwright.engine.periodic import NEVER, Saver
from trainwright.engine.run_length import Until
from trainwright.engine.step import StepFn
from trainwright.engine.witness import SILENT
from trainwright.finetune.generations import Generations
from trainwright.monitoring.alerts.setup import alerting
from trainwright.monitoring.evaluation import PeriodicEvaluation
from trainwright.monitoring.heartbeat import Heartbeat
from trainwright.monitoring.layer_stats import LayerObserver
from trainwright.monitoring.log_window import LogWindow, NotLogging
from trainwright.monitoring.logbook import Logbook
from trainwright.monitoring.progress import Progress
from trainwright.monitoring.remaining import EndTime, TimeSpent
from trainwright.monitoring.samples import TextSamples
from trainwright.monitoring.saving import MIN_FRACTION_SAVE_INTERVAL_S, SavePolicy, Saving, SavingTogether
from trainwright.monitoring.signals import Signals
from trainwright.monitoring.sinks.factories import sink_factories
from trainwright.plan.explain import describe_corrected_end
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import NoLock, RunLock
from trainwright.runs.records import Ended, Found, Record, RunVerdict
from trainwright.training.evaluation import every, periodic_evaluation
from trainwright.training.job import Job, is_watched, make_advance, spike_handler, until_of, until_of_job
from trainwright.training.layers import layer_observers
from trainwright.training.resume import resume_command
from trainwright.training.run_metadata import folder_guard, run_metadata
from trainwright.training.time_left import seconds_left
from trainwright.training.verdict import verdict_on
from trainwright.version import __version__
from trainwright.watching.engine import EngineObserver
from trainwright.watching.ranks_observer import RanksObserver

Extra = Callable[[Job, RunFolder, Progress], Observer]
"""Makes a further observer of a run after everything else of it is built."""
HANG_TIMEOUT_FRACTION = 0.8
"""Fraction of the collective timeout after which a rank is reported as hanging, so the report precedes the timeout."""


@dataclass(frozen=True)
class Process:
    """This process during a run: how it was started, all ranks, output and signals.

    ``closing`` is undone when the run is over.
    """

    launch: Launch
    world: World
    progress: Progress
    signals: Signals
    closing: ExitStack

    @property
    def is_first(self) -> bool:
        """True on the rank that decides and writes the run folder."""
        return self.world.rank == 0


@dataclass(frozen=True)
class HeldFolder:
    """The run folder, its lock and identity, and the checkpoint that was resumed. Other ranks have the folder only."""

    folder: RunFolder
    lock: RunLock | NoLock
    identity: str
    restored: Path | None


@dataclass(frozen=True)
class OpenRun:
    """A run that is ready for its first step.

    Attributes:
        batches: The batches to train on.
        step: The step function.
        until: The completed fraction of the run.
        observers: Called after each step.
        evaluation: The evaluation that the plan schedules; None without a validation set.
        saving: Saves checkpoints.
        reports: The log and the doctor of the first rank; None on the others, which write nothing.
    """

    batches: Iterable[StepBatch]
    step: StepFn
    until: Until
    observers: tuple[Observer, ...]
    evaluation: PeriodicEvaluation | None
    saving: Saver
    reports: Reports | None = None

    def record_end(self, outcome: Outcome, state: TrainState) -> None:
        """Record the end of the run. The log adds the verdict when it is closed."""
        if self.reports is not None:
            self.reports.record_end(outcome, state, self.evaluation)


@dataclass(frozen=True)
class Reports:
    """The log and the doctor of a run, and its newest checkpoint, on the first rank."""

    logbook: Logbook
    doctor: EngineObserver | RanksObserver | None
    saver: Saving

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that this process has written."""
        return self.saver.last

    @property
    def findings(self) -> tuple[Found, ...]:
        """The findings of the doctor."""
        return tuple(self.doctor.findings()) if self.doctor else ()

    def record_end(self, outcome: Outcome, state: TrainState, evaluation: PeriodicEvaluation | None) -> None:
        """Record the end of the run, for the log to write when it is closed."""
        seen, log = evaluation.last if evaluation else None, self.logbook
        log.recorder.record_skipped(state)
        log.ended = Ended(
            time_s=time.time(),
            ending=outcome.ending,
            reason=outcome.stop.reason if outcome.stop else "",
            step=outcome.step,
            loss=float(outcome.last.loss) if outcome.last else None,
            val_loss=seen.loss if seen else None,
            skipped=log.recorder.num_skipped,
            seconds=log.seconds,
        )


@contextmanager
def open_run(job: Job, place: HeldFolder, process: Process, extras: Sequence[Extra] = ()) -> Iterator[OpenRun]:
    """Open log, doctor, evaluation and saving, on a rank other than the first only what takes part in exchanges."""
    opened = _open_on_first(job, place, process, extras) if process.is_first else _open_on_other(job, place, process)
    with opened as run:
        if job.accepted:  # after a kill before the next save, the differences would have to be accepted again
            run.saving(job.state)
        yield run


@contextmanager
def _open_on_first(job: Job, place: HeldFolder, process: Process, extras: Sequence[Extra]) -> Iterator[OpenRun]:
    plan, state, folder, progress, signals = job.plan, job.state, place.folder, process.progress, process.signals
    lock = place.lock
    assert isinstance(lock, RunLock)
    logbook = Logbook(
        folder,
        every(plan.cadence.log_every, state),
        sinks=sink_factories(job.recipe.log.sinks),
        config=job.recipe.model_dump(mode="json"),
        state=state,
        gpu_indices=[gpu.index for gpu in job.hardware.machine.gpus] if job.device.type == "cuda" else [],
        by_the_clock=plan.extent.seconds is not None,
        warn=progress.say,
    )
    with alerting(job.recipe.alerts, folder, progress.say) as alerts, logbook:
        logbook.start(__version__, place.restored, lock.died_in_step, job.accepted, plan.header.in_words())
        saver = _saving(job, place, lock, process, logbook)
        signals.saving_s, signals.newest = lambda: saver.last_s, lambda: str(saver.last or place.restored)
        doctor = make_doctor(job, folder, logbook.journal.write, progress.say)
        if doctor:
            progress.findings = doctor.findings
        reports = Reports(logbook, doctor, saver)
        evaluation = periodic_evaluation(
            job, (logbook.recorder, progress, saver), is_reported=isinstance(doctor, EngineObserver)
        )
        spent = TimeSpent(lambda: doctor.seconds if doctor else 0.0)

        def left_s(state: TrainState) -> float | None:
            measured = spent.measured()
            return None if measured is None else seconds_left(job, measured, state, until, saver.last_s)

        def judge(ended: Ended) -> RunVerdict:
            return verdict_on(
                job,
                folder,
                ended,
                logbook.recorder,
                findings=reports.findings,
                examined=doctor is not None,
                saved=ended.ending == "failed" or is_saved(saver.last, ended.step),
            )

        progress.left_s, logbook.judge = left_s, judge
        further = [
            make(job, folder, progress) for make in extras
        ]  # before hooks are registered: they may run the model
        steps = _instrumented(job, doctor, logbook)
        for each in job.built.observers:
            if isinstance(each, Generations):
                write = partial(_generated, each, job)
                each.show = TextSamples(write, folder=folder.samples, say=progress.say, at=()).show
        observers: list[Observer] = [steps.window, logbook.recorder, logbook.telemetry, spent, progress]
        observers += [*_end_time(job, progress), *_not_logging(doctor), *job.built.observers]
        observers += [*further, *alerts, *steps.layers, signals, Heartbeat(lock, state)]
        listening: AbstractContextManager[None] = nullcontext()
        if isinstance(doctor, EngineObserver):
            listening = doctor.listening()
        with listening, _checkpoint_note(job, folder, saver), steps.window.collecting():
            until = until_of_job(job)  # starts its clock
            yield OpenRun(
                # other ranks would wait for one that a signal stops
                signals.batches(job.batches) if process.world.size == 1 else job.batches,
                doctor.around(steps.advance) if isinstance(doctor, EngineObserver) else steps.advance,
                until,
                tuple(observers),
                evaluation,
                SavingTogether(process.world, saver) if job.saves_together else saver,
                reports,
            )


@contextmanager
def _open_on_other(job: Job, place: HeldFolder, process: Process) -> Iterator[OpenRun]:
    evaluation = periodic_evaluation(job)
    saving = SavingTogether(process.world, stages=job.mesh.stages_of_first) if job.saves_together else NEVER
    doctor = make_doctor(job, place.folder)
    steps = _instrumented(job, doctor, None)
    with steps.window.collecting():
        observers: list[Observer] = [steps.window, *_not_logging(doctor), *steps.layers, process.signals]
        yield OpenRun(job.batches, steps.advance, until_of(job.plan), tuple(observers), evaluation, saving)


def _generated(observer: Generations, job: Job) -> str:
    with job.precision.autocast():
        return observer.text_of(job.state.model)


def _not_logging(doctor: EngineObserver | RanksObserver | None) -> Iterator[Observer]:
    if doctor is not None:
        yield NotLogging(doctor)


@dataclass(frozen=True)
class _Instrumented:
    """The step function of a run, and the observers that receive values from inside of it."""

    advance: StepFn
    window: LogWindow
    layers: tuple[LayerObserver, ...]


def _instrumented(job: Job, doctor: EngineObserver | RanksObserver | None, logbook: Logbook | None) -> _Instrumented:
    every_record = every(job.plan.cadence.log_every, job.state) if job.mesh.sums.size > 1 else None
    window = LogWindow(job.built.train_metrics, job.mesh.sums, every_record)
    if logbook is not None:
        logbook.recorder.window = window.values
    layers = tuple(layer_observers(job, logbook))
    witness, probes = doctor.witness if doctor else SILENT, [each.probe for each in layers]
    return _Instrumented(
        make_advance(job, witness, spike_handler(job.loaded), window.keeper, probes),
        window,
        layers,
    )


def make_doctor(
    job: Job,
    folder: RunFolder,
    write: Callable[[Record], None] = lambda record: None,
    say: Callable[[str], None] = lambda line: None,
) -> EngineObserver | RanksObserver | None:
    """Return the doctor of this rank, which replays steps or, with several ranks, compares them; None without one.

    With several ranks the result depends on the recipe only, so all ranks have a doctor, or none does.
    """
    if is_watched(job):
        return make_engine_observer(job, folder, say)
    if not compares_ranks(job):
        return None
    degrees = job.mesh.degrees
    return RanksObserver(
        job.state,
        folder,
        are_copies=degrees.replicate == degrees.ranks,
        has_own_samples=job.mesh.data.size == job.world.size,
        patience_s=HANG_TIMEOUT_FRACTION * job.recipe.parallel.timeout.value,
        write=write,
        say=say,
    )


def compares_ranks(job: Job) -> bool:
    """Return True if the doctor compares the ranks of this job."""
    return job.recipe.log.doctor and job.world.size > 1


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


def _end_time(job: Job, progress: Progress) -> Iterator[EndTime]:
    """Yield the observer of the predicted end, if the run has no time limit and a step was timed."""
    predicted_s = job.plan.predicted.step_s
    if predicted_s is not None and job.loaded.within_s is None:
        yield EndTime(
            progress.left_s,
            lambda step_s, left_s, now_s: describe_corrected_end(step_s, predicted_s, left_s, now_s),
            progress.say,
        )


def _saving(job: Job, place: HeldFolder, lock: RunLock, process: Process, logbook: Logbook) -> Saving:
    plan, ask = job.plan, job.recipe.checkpoint
    policy = SavePolicy(
        every(plan.cadence.save_every, job.state) if plan.cadence.save_every else None,
        MIN_FRACTION_SAVE_INTERVAL_S if ask.every is not None and ask.every.unit == "run" else 0.0,
        ask.at_least_every.value if ask.at_least_every else None,
        Retention(ask.keep, plan.cadence.keep_every),
        ask.best,
        ask.best_mode == "max",
        plan.cadence.evaluate_batches,
        ask.asynchronous,
    )
    return Saving(
        place.folder.checkpoints,
        policy,
        listener=logbook.recorder,
        warn=process.progress.say,
        run_metadata=run_metadata(job),
        run=place.identity,
        folder_guard=folder_guard(place.folder, job, lock, place.identity, process.progress.say),
        clock=process.world.clock if process.world.size == 1 else time.monotonic,  # other ranks have no say in it
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


def measure_norms(job: Job, say: Callable[[str], None] = lambda line: None) -> None:
    """Measure the BatchNorm statistics of the SWA average on the training batches that would come next."""
    average, ask = job.state.ema, job.recipe.model.swa
    if ask is None or not isinstance(average, Swa) or not average.num_updates or average.is_complete:
        return
    batches = islice(job.batches, ask.norm_batches or job.plan.steps_per_epoch)
    measured = measure_norms_of(
        average, job.state, job.parts.loss, batches, precision=job.precision, world=job.mesh.sums
    )
    if not measured:
        say("the training data are used up: BatchNorm statistics of the average are those of the trained weights")


def is_saved(newest: Path | None, step: int) -> bool:
    """Return True if the newest checkpoint is that of this step."""
    return newest is not None and newest.name == f"step-{step:08d}"
