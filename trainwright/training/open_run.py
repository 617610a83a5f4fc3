"""Opens everything around the steps of a run: log, sinks, alerts, doctor, evaluation, saving, layer statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.utils.data import IterableDataset

from trainwright.assembly.assemble import build_loading, validation_sets
from trainwright.assembly.retain_grad import retained_modules
from trainwright.checkpoint.average import Swa
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.remote import CheckpointCopies
from trainwright.checkpoint.sharded import ShardedSave
from trainwright.checkpoint.shards import is_divided
from trainwright.checkpoint.store import Retention
from trainwright.checkpoint.train_state import TrainState
from trainwright.data.loading import EvaluationBatches
from trainwright.data.ready_batches import ReadyBatches
from trainwright.data.unwrap import Unwrapped
from trainwright.distributed import Launch, World
from trainwright.distributed.device import device_name
from trainwright.distributed.group import Ranks
from trainwright.engine.average_norms import measure_norms_of
from trainwright.engine.evaluate import EvaluationResult
from trainwright.engine.graphs import StepGraphs
from trainwright.engine.loop import NEVER, ByTheClock, Outcome, Saver, Until
from trainwright.engine.loss import measures_progress, takes_model
from trainwright.engine.observer import Observer
from trainwright.engine.peers import Peers
from trainwright.engine.step import StepFn, StepResult
from trainwright.engine.witness import SILENT
from trainwright.finetune.generations import Generations
from trainwright.monitoring.alerts import alerting
from trainwright.monitoring.cadence import Every
from trainwright.monitoring.evaluation import EvaluationListener, PeriodicEvaluation, ValidationSet
from trainwright.monitoring.layer_stats import (
    CustomStepLayers,
    LayerLog,
    LayerObserver,
    LayerStats,
    OutputGradObserver,
    OutputGradStats,
    scalars_of,
)
from trainwright.monitoring.logbook import Logbook
from trainwright.monitoring.progress import EndTime, Measured, Progress, TimeSpent
from trainwright.monitoring.samples import TextSamples
from trainwright.monitoring.saving import MIN_FRACTION_SAVE_INTERVAL_S, PartSaving, SavePolicy, Saving, SavingTogether
from trainwright.monitoring.signals import Signals
from trainwright.monitoring.sinks import sink_factories
from trainwright.monitoring.step_log import LogWindow, StepLog
from trainwright.optim.clip import summed_over_parts
from trainwright.optim.stepped_schedule import SteppedSchedule
from trainwright.plan.duration import Interval
from trainwright.plan.explain import describe_corrected_end
from trainwright.plan.machine import read_machine
from trainwright.plan.run_time import EvaluationCost, ReadingPace, predicted_seconds, training_time_s
from trainwright.recipe.catalog import LOSSES
from trainwright.recipe.grid import grams_per_kwh
from trainwright.recorder.engine_source import EngineLoader, ReportedBatches
from trainwright.report.pages.log import IncrementalLog
from trainwright.report.verdict import VerdictFacts, evaluations_in, judge
from trainwright.runs.folder import RunFolder
from trainwright.runs.lock import NoLock, RunLock
from trainwright.runs.reader import UNUSED, Usage
from trainwright.runs.records import (
    Ended,
    Evaluated,
    Found,
    Layers,
    Logged,
    NotCaptured,
    OutputGrads,
    Record,
    RunVerdict,
)
from trainwright.training.custom_objects import spike_handler
from trainwright.training.job import (
    ENDING_S,
    Job,
    has_doctor,
    is_watched,
    make_advance,
    step_graphs,
    until_of,
    until_of_job,
    usd_per_hour,
)
from trainwright.training.layout import evaluation_loss
from trainwright.training.resume import resume_command
from trainwright.training.run_metadata import folder_guard, run_metadata
from trainwright.version import __version__
from trainwright.watching.budget import predicted_end_s, predicted_s

if TYPE_CHECKING:
    from trainwright.watching.engine import EngineSession
    from trainwright.watching.ranks_observer import RanksObserver

Extra = Callable[[Job, RunFolder, Progress], Observer]
"""Makes a further observer of a run. It is called before layers are hooked, so it may run the model."""
HANG_TIMEOUT_FRACTION = 0.8
"""Fraction of the collective timeout after which a rank is reported as hanging, so the report precedes the timeout."""

MIN_WAIT_FRACTION = 0.3
"""Waiting for data is mentioned above this fraction of the time."""
MIN_WAIT_S = 1e-3
"""Minimum mean wait to be mentioned. A worker needs about this time to pass a batch."""


@dataclass(frozen=True)
class Process:
    """This process during a run: how it was started, all ranks, output and signals.

    ``closing`` is closed when the run is over.
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
        until: Returns the completed fraction of the run.
        evaluation: None without a validation set.
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
    doctor: EngineSession | RanksObserver | None
    saver: Saving
    usd_per_hour: float | None = None
    grams_per_kwh: float | None = None
    used: Usage = UNUSED
    """Time and energy of earlier processes of the run."""

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that this process has written."""
        return self.saver.last

    @property
    def findings(self) -> tuple[Found, ...]:
        return tuple(self.doctor.findings()) if self.doctor else ()

    def record_end(self, outcome: Outcome, state: TrainState, evaluation: PeriodicEvaluation | None) -> None:
        """Record the end of the run, for the log to write when it is closed."""
        seen, log = evaluation.last if evaluation else None, self.logbook
        log.recorder.record_skipped(state)
        energy_kwh = log.telemetry.energy_kwh
        energy_kwh = None if energy_kwh is None else self.used.kwh + energy_kwh
        log.ended = Ended(
            time_s=time.time(),
            ending=outcome.ending,
            reason=outcome.stop.reason if outcome.stop else "",
            step=outcome.step,
            loss=float(outcome.last.loss) if outcome.last else None,
            val_loss=seen.loss if seen else None,
            skipped=log.recorder.num_skipped,
            seconds=log.seconds,
            energy_kwh=energy_kwh,
            co2_g=None if energy_kwh is None or self.grams_per_kwh is None else self.grams_per_kwh * energy_kwh,
            usd=None if self.usd_per_hour is None else self.usd_per_hour * (self.used.seconds + log.seconds) / 3600,
        )


@contextmanager
def open_run(job: Job, place: HeldFolder, process: Process, extras: Sequence[Extra] = ()) -> Iterator[OpenRun]:
    """Open log, doctor, evaluation and saving. Ranks other than the first open only what takes part in exchanges."""
    opened = _open_on_first(job, place, process, extras) if process.is_first else _open_on_other(job, place, process)
    with opened as run:
        if job.accepted:  # save them now, or the user must accept the same differences again after an early kill
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
        session = make_engine_session(job, folder, progress.say) if is_watched(job) else None
        doctor = session or make_ranks_observer(job, folder, logbook.journal.write, progress.say)
        if doctor:
            progress.findings = doctor.findings
        grams = None if job.recipe.grid is None else grams_per_kwh(job.recipe.grid)
        reports = Reports(logbook, doctor, saver, usd_per_hour(job), grams, job.used)
        evaluation = periodic_evaluation(job, (logbook.recorder, progress, saver), is_reported=session is not None)
        spent = TimeSpent(lambda: doctor.seconds if doctor else 0.0)

        def left_s(state: TrainState) -> float | None:
            measured = spent.measured()
            return None if measured is None else seconds_left(job, measured, state, until, saver.last_s)

        def verdict(ended: Ended) -> RunVerdict:
            return _verdict_on(
                job,
                folder,
                ended,
                logbook.recorder,
                findings=reports.findings,
                examined=doctor is not None,
                saved=ended.ending == "failed" or is_saved(saver.last, ended.step),
            )

        progress.left_s, logbook.judge = left_s, verdict
        further = [make(job, folder, progress) for make in extras]  # before hooks: an extra may run the model
        steps = _instrumented(job, doctor, logbook)
        for each in job.built.observers:
            if isinstance(each, Generations):
                write = partial(_generated, each, job)
                each.show = TextSamples(write, folder=folder.samples, say=progress.say, at=()).show
        observers: list[Observer] = [steps.window, logbook.recorder, logbook.telemetry, spent, progress]
        observers += [*_end_time(job, progress), *([doctor] if doctor else []), *job.built.observers]
        observers += [*further, *alerts, *steps.layers, signals, Heartbeat(lock, state)]
        listening: AbstractContextManager[None] = nullcontext() if session is None else session.listening()
        with listening, _checkpoint_note(job, folder, saver), steps.window.collecting():
            until = until_of_job(job)  # starts its clock
            yield OpenRun(
                # several ranks: if a signal stopped one rank here, the others would wait for it
                signals.batches(job.batches) if process.world.size == 1 else job.batches,
                steps.advance if session is None else session.around(steps.advance),
                until,
                tuple(observers),
                evaluation,
                SavingTogether(process.world, saver) if job.saves_together else saver,
                reports,
            )


@contextmanager
def _open_on_other(job: Job, place: HeldFolder, process: Process) -> Iterator[OpenRun]:
    evaluation = periodic_evaluation(job)
    saving: Saver = NEVER
    if (shards := _sharded_save(job)) is not None:
        own = PartSaving(place.folder.checkpoints, shards, asynchronous=job.recipe.checkpoint.asynchronous)
        saving = SavingTogether(process.world, own)
    doctor = make_ranks_observer(job, place.folder)
    steps = _instrumented(job, doctor, None)
    with steps.window.collecting():
        observers: list[Observer] = [steps.window, *([doctor] if doctor else []), *steps.layers, process.signals]
        yield OpenRun(job.batches, steps.advance, until_of(job.plan), tuple(observers), evaluation, saving)


def _generated(observer: Generations, job: Job) -> str:
    with job.precision.autocast():
        return observer.text_of(job.state.model)


@dataclass(frozen=True)
class _Instrumented:
    """The step function of a run, and the observers that receive values from inside of it."""

    advance: StepFn
    window: LogWindow
    layers: tuple[LayerObserver, ...]


def _instrumented(job: Job, doctor: EngineSession | RanksObserver | None, logbook: Logbook | None) -> _Instrumented:
    every_record = every(job.plan.cadence.log_every, job.state) if job.mesh.sums.size > 1 else None
    window = LogWindow(job.built.train_metrics, job.mesh.sums, every_record)
    if logbook is not None:
        logbook.recorder.window, logbook.recorder.shown = window.values, window.shown
    layers = tuple(layer_observers(job, logbook))
    witness, probes = doctor.witness if doctor else SILENT, [each.probe for each in layers]
    return _Instrumented(
        make_advance(job, witness, spike_handler(job.loaded), window.keeper, probes, _graphs(job, layers, logbook)),
        window,
        layers,
    )


def _graphs(job: Job, layers: Sequence[LayerObserver], logbook: Logbook | None) -> StepGraphs | None:
    def report(reason: str) -> None:
        if logbook is not None:
            logbook.journal.write(NotCaptured(time_s=time.time(), step=job.state.step, reason=reason))

    return step_graphs(job, report, lambda state: any(each.is_due(state) for each in layers))


def make_ranks_observer(
    job: Job,
    folder: RunFolder,
    write: Callable[[Record], None] = lambda _record: None,
    say: Callable[[str], None] = lambda _line: None,
) -> RanksObserver | None:
    """Return the doctor of several ranks, which compares them; None without one.

    The result depends on recipe and world size only, so all ranks have a doctor, or none does.
    """
    if not compares_ranks(job):
        return None
    from trainwright.watching.ranks_observer import RanksObserver  # imports the doctor, which this run may not have

    degrees = job.mesh.degrees
    return RanksObserver(
        job.state,
        folder,
        are_copies=degrees.replicate == degrees.ranks,
        has_own_samples=job.mesh.data.size == job.world.size,
        patience_s=HANG_TIMEOUT_FRACTION * job.recipe.parallel.timeout.value,
        write=write,
        say=say,
        peers=_peers(job) if job.replays_ranks else None,
    )


def _peers(job: Job) -> Peers:
    world = job.mesh.sums
    assert isinstance(world, Ranks)
    name = device_name(job.device, read_machine())
    return Peers(world, job.parts.loss, job.precision, seed=job.recipe.seed, processor=name)


def compares_ranks(job: Job) -> bool:
    """Return True if the doctor compares the ranks of this job."""
    return has_doctor(job) and job.world.size > 1


def make_engine_session(job: Job, folder: RunFolder, say: Callable[[str], None]) -> EngineSession:
    """Return the doctor of a run. Its ``witness`` goes into the step function, which ``around`` wraps."""
    from trainwright.watching.engine import EngineSession  # imports the doctor, which this run may not have

    return EngineSession(
        job.state,
        folder=folder,
        say=say,
        examine=job.recipe.log.examine,
        accumulation=job.plan.batch.accumulation,
        keeps_last_steps=job.is_only_in_python,  # other runs can repeat any step from a checkpoint
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
    retention, copies = Retention(ask.keep, plan.cadence.keep_every), None
    if ask.copy_to is not None:
        copies = CheckpointCopies(place.folder, ask.copy_to, run=place.identity, retention=retention)
    policy = SavePolicy(
        every(plan.cadence.save_every, job.state) if plan.cadence.save_every else None,
        MIN_FRACTION_SAVE_INTERVAL_S if ask.every is not None and ask.every.unit == "run" else 0.0,
        ask.at_least_every.value if ask.at_least_every else None,
        retention,
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
        clock=process.world.clock if process.world.size == 1 else time.monotonic,  # ``Ranks.clock`` needs all ranks
        shards=_sharded_save(job),
        copies=copies,
    )


def _sharded_save(job: Job) -> ShardedSave | None:
    """Return how this rank writes its part of each checkpoint; None if the first rank writes all of it."""
    if not job.saves_together or not isinstance(job.world, Ranks):
        return None
    return ShardedSave(job.world, has_values=job.mesh.is_first_of_stage)


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
        elif job.state.step:
            error.add_note(f"nothing is saved: step {job.state.step + 1} may be incomplete, and no save was due before")
        raise


def measure_norms(job: Job, say: Callable[[str], None] = lambda _line: None) -> None:
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


def periodic_evaluation(
    job: Job, listeners: Sequence[EvaluationListener] = (), *, is_reported: bool = False
) -> PeriodicEvaluation | None:
    """Return the evaluation that the plan schedules; None without a validation set.

    With ``is_reported``, the recorder receives the batches as if they came from a DataLoader.
    """
    world = job.mesh.data
    loading = build_loading(job.parts, job.recipe, job.plan, job.device, world=world)
    rows = job.recipe.evaluation.batch or loading.micro_size
    whole_sets = validation_sets(job.parts, job.recipe.evaluation, loading)
    sets = {name: _in_course(job, whole) for name, whole in whole_sets.items()}
    if not sets:
        return None
    if is_reported:
        sets = {name: _reported(each, job.parts.val_sets[name]) for name, each in sets.items()}
    return PeriodicEvaluation(
        sets,
        evaluation_loss(job.parts.loss, job.mesh, job.staged(rows)),
        every(job.plan.cadence.evaluate_every, job.state),
        precision=job.precision,
        listeners=[*listeners, *_schedules(job)],
        world=job.mesh.sums,
        metrics=job.built.metrics,
    )


def _in_course(job: Job, whole: EvaluationBatches) -> ValidationSet:
    count = job.plan.cadence.evaluate_batches
    part = whole.part(count) if count and not job.recipe.evaluation.batches else whole
    return ValidationSet(part, whole if job.plan.cadence.evaluates_whole else part, count)


def _reported(each: ValidationSet, source: Unwrapped | None) -> ValidationSet:
    loader = EngineLoader(None if source is None else source.origin)
    part = ReportedBatches(loader, each.in_course)  # if both are one object, keep that: the end is evaluated once
    return ValidationSet(
        part, part if each.at_end is each.in_course else ReportedBatches(loader, each.at_end), each.count
    )


def _schedules(job: Job) -> Iterator[EvaluationListener]:
    if isinstance(job.built.schedule, SteppedSchedule) and job.built.schedule.needs_evaluation:
        yield _ByMetric(job.built.schedule, job.recipe.checkpoint.best or "loss", job.plan.cadence.evaluate_batches)


class _ByMetric(NamedTuple):
    """Reports a validation metric to a schedule, from evaluations over ``batches`` batches only.

    An evaluation of the full set at the end of a run has another number of batches and is ignored.
    """

    schedule: SteppedSchedule
    metric: str
    batches: int

    def evaluated(self, step: int, seen: EvaluationResult) -> None:
        if seen.batches == self.batches:
            self.schedule.evaluated(step, seen.figure(self.metric))


def every(interval: Interval, since: TrainState) -> Every:
    """Return the boundaries of an interval of the recipe, from ``since`` on."""
    return Every(steps=interval.steps, seconds=interval.seconds, fraction=interval.fraction, since=since)


def seconds_left(job: Job, measured: Measured, state: TrainState, until: Until, save_s: float | None) -> float:
    """Return the seconds until the command ends, extrapolated from measurements of this run.

    ``save_s`` is the duration of the last save, since another one follows at the end. None: no save yet.
    """
    if isinstance(until, ByTheClock):
        return until.left_s
    plan = replace(job.plan, predicted=replace(job.plan.predicted, step_s=max(measured.step_s, 1e-9)))
    left = predicted_seconds(plan, _evaluation_cost(job, measured), used=until_of(plan)(state))
    steps_left = left["training"] / max(measured.step_s, 1e-9)
    beside_s = steps_left * measured.beside_s + (ENDING_S if save_s is None else save_s)
    examinations_s = _examinations_s(job, measured, steps_left) if is_watched(job) else 0.0
    return sum(left.values()) + beside_s + examinations_s


def _evaluation_cost(job: Job, measured: Measured) -> EvaluationCost | None:
    """Return the cost of an evaluation measured in this run; before the first one, the cost measured by the dry run."""
    cost, seconds = job.measured.evaluation_cost, measured.evaluation_s
    if seconds is None:
        return cost
    batches = None if cost is None else cost.batches
    return EvaluationCost(seconds / (job.plan.cadence.evaluate_batches or batches or 1), batches or 1)


def _examinations_s(job: Job, measured: Measured, steps_left: float) -> float:
    """Return the seconds for the remaining examinations, within the budget of the full run."""
    total_s = training_time_s(replace(job.plan, predicted=replace(job.plan.predicted, step_s=measured.step_s))) or 0.0
    end_s = predicted_end_s(total_s)
    left_s = max(0.0, predicted_s(total_s) - measured.examined_s)
    return min(left_s, end_s + steps_left * measured.examination_s)


def layer_observers(job: Job, logbook: Logbook | None = None) -> Iterator[LayerObserver]:
    """Yield the observers of statistics by layer and of output gradients by module.

    ``logbook`` is None on a rank that writes nothing.
    """
    yield from _layer_observers(job, logbook)
    modules = retained_modules(job.state.model, job.recipe.log.retain_grad)
    if modules and logbook is not None:
        yield _output_grad_observer(OutputGradStats(modules), logbook)


def _output_grad_observer(stats: OutputGradStats, logbook: Logbook) -> OutputGradObserver:
    def write(record: OutputGrads) -> None:
        logbook.journal.write(record)
        values = {f"output_grad_norm/{path}": each for path, each in zip(stats.paths, record.norm) if each == each}
        for sink in logbook.sinks:
            sink.scalars(record.step, values)

    return OutputGradObserver(LayerLog(stats, write, OutputGrads), stats)


def _layer_observers(job: Job, logbook: Logbook | None) -> Iterator[LayerObserver]:
    """Yield the observer of statistics by layer, or nothing for a pipeline, whose stages have different layers.

    If ranks have full copies, only the first rank measures. Its gradients and updates are the same on all ranks, but
    its activations are of its own samples. If ranks divide the weights, all of them measure their parts in the same
    steps. A compiled model is not hooked, because that would compile it again.
    """
    in_parts = job.divides_weights
    if not job.recipe.log.layers or job.plan.degrees.pipeline > 1 or (logbook is None and not in_parts):
        return
    activations = logbook is not None and not job.recipe.model.compile
    stats = LayerStats(job.state.model, activations=activations, combine_shards=_summed if in_parts else None)

    def write(record: Layers) -> None:
        if logbook is not None:
            logbook.journal.write(record)
            for sink in logbook.sinks:
                sink.scalars(record.step, scalars_of(record, stats.paths))

    if stats.layers:
        log = LayerLog(stats, write, Layers, in_step=in_parts)
        yield LayerObserver(log) if job.parts.custom.advance is None else CustomStepLayers(log, job.state)


def _summed(squares: Tensor, parameters: Sequence[Tensor]) -> None:
    """Add up the squares of all shards of each parameter, in place. Needs one exchange per distinct sharding."""
    shardings: dict[object, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if is_divided(parameter):
            shardings.setdefault((parameter.device_mesh, parameter.placements), []).append(index)
    for indices in shardings.values():
        if len(indices) == len(parameters):  # indexing columns costs a host sync
            summed_over_parts(squares, parameters[0])
        else:
            squares[:, indices] = summed_over_parts(squares[:, indices], parameters[indices[0]])


class Heartbeat:
    """Observer that records the step in progress in the run's lock; takes about 2 us per step.

    The evaluation after a step counts as a part of this step, but saving as a part of the next one.
    """

    def __init__(self, lock: RunLock, state: TrainState) -> None:
        self._lock = lock
        lock.beat(state.step + 1)

    def observe(self, result: StepResult, _state: TrainState) -> None:
        self._lock.beat(result.step + 1)

    def close(self) -> None:
        """Do nothing: the code that took the lock releases it."""


def is_saved(newest: Path | None, step: int) -> bool:
    """Return True if the newest checkpoint is of this step."""
    return newest is not None and newest.name == f"step-{step:08d}"


def _verdict_on(
    job: Job, folder: RunFolder, ended: Ended, log: StepLog, *, findings: Sequence[Found], examined: bool, saved: bool
) -> RunVerdict:
    """Return the verdict on a run from its full log, including earlier processes."""
    course = IncrementalLog(folder.log)
    course.advance()
    return judge(
        VerdictFacts(
            state=ended.ending,
            reason=ended.reason,
            step=ended.step,
            planned_steps=job.plan.extent.steps,
            losses=course.losses,
            is_one_objective=_is_one_objective(job),
            chance=job.plan.predicted.expected_loss,
            evaluations=evaluations_in(course.notes(Evaluated, Logged)),
            findings=findings,
            data_warnings=[each.name for audit in job.supervision for each in audit.warnings],
            skipped=ended.skipped,
            examined=examined,
            saved=saved,
            troubles=tuple(_troubles(job, log)),
            references=job.marks,
        )
    )


def _is_one_objective(job: Job) -> bool:
    """Return True if the training loss compares model outputs with fixed samples.

    A custom step may train several models against each other. A stream may be generated by the model, and a loss that
    receives the model may generate data too, such as episodes of a policy.
    """
    is_stream = isinstance(job.parts.train.dataset, IterableDataset | ReadyBatches)
    has_targets = job.recipe.loss.use in LOSSES or not takes_model(job.parts.loss)
    return job.parts.custom.advance is None and not is_stream and has_targets and measures_progress(job.parts.loss)


def _troubles(job: Job, log: StepLog) -> Iterator[str]:
    if log.wait_fraction > MIN_WAIT_FRACTION and log.wait_s > MIN_WAIT_S:
        yield f"{log.wait_fraction:.0%} of the time went into waiting for data ({_reads_faster(job, log)})"


def _reads_faster(job: Job, log: StepLog) -> str:
    """Return advice on waiting for data, from measurements of this run."""
    if isinstance(job.parts.train.dataset, ReadyBatches):
        return "time a loop over the loader alone, with num_workers=0 and with more"
    return ReadingPace(job.recipe.data.workers, log.wait_s, log.read_s).advice()
