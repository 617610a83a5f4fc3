"""Runs the trials of a sweep, several at once, and resumes a sweep that was killed."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from trainwright.commands.sweep.result import INTERRUPTED, SweepResult, ranked, shown, train_best, write_results
from trainwright.commands.sweep.spec import (
    SPEC,
    TRAIN_LOSS,
    VALIDATION_LOSS,
    Sweep,
    differences,
    read_sweep,
    setting_of,
    spec_of,
    without_overrides,
)
from trainwright.commands.sweep.study import (
    JOURNAL,
    StudyTrials,
    TrialRow,
    Unfinished,
    quiet_optuna,
    trial_folder,
)
from trainwright.errors import StorageError, UsageError, import_optional
from trainwright.plan.amounts import human_seconds
from trainwright.plan.machine import read_machine
from trainwright.recipe import load
from trainwright.runs import system_calls
from trainwright.runs.files import UnreadableFile, open_file, read_text
from trainwright.runs.folder import RunFolder
from trainwright.runs.printing import figure
from trainwright.runs.reader import decode_lines
from trainwright.runs.records import Evaluated, Record, Step
from trainwright.runs.shapes import PlanFile, read_as
from trainwright.runs.storage import write_atomically
from trainwright.trials import Trial, TrialProcess, read_trial

POLL_S = 0.05
LOCK = "sweep.lock"
MAX_WAIT_S = 120.0
"""Seconds for which a new process waits for the trials of a killed sweep to save."""
PROCESS_BYTES = 700 * 2**20
"""Memory of a process that has imported torch, in addition to the memory in the plan."""
MAX_FAILED_AT_FIRST = 3
"""A sweep ends if this number of trials has failed and none has succeeded, because the others would fail too."""

Say = Callable[[str], None]


@dataclass
class _Running:
    """A trial in progress. ``device`` is the GPU that it uses; None on a CPU."""

    trial: Unfinished
    process: TrialProcess
    values: ValueReader
    device: str | None


def run_sweep(sweep: Sweep, *, say: Say = print) -> SweepResult:
    """Run the trials of a sweep that have not ended, and return the table of all trials.

    Ctrl-C, SIGTERM and the end of the budget stop the trials in progress, which save. The same call resumes them.
    Raises UsageError if the folder contains another sweep, or another process runs this one.
    """
    import_optional("optuna", needed_for="a sweep")
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {sweep.folder}: {error}", remedy="choose another --folder") from None
    with _locked(sweep.folder / LOCK, say) as lock, quiet_optuna(), _stopping() as stop:
        # A process that was killed during a write leaves this lock. No other process writes now.
        (sweep.folder / f"{JOURNAL}.lock").unlink(missing_ok=True)
        _keep_spec(sweep)
        return _Control(sweep, lock, stop, say).run()


class _Control:
    """The loop of a sweep: starts trials, reads their values, prunes them, and writes their results."""

    def __init__(self, sweep: Sweep, lock: int, stop: threading.Event, say: Say) -> None:
        self._sweep = sweep
        self._lock = lock
        self._stop = stop
        self._say = say
        self._environ = without_overrides(os.environ)
        self._trials = StudyTrials(sweep)
        self._running: list[_Running] = []
        self._pending: deque[Unfinished] = deque()
        self._devices = _devices(sweep)
        self._jobs = sweep.jobs or len(self._devices) or None
        self._began_s = time.monotonic()
        self._seconds_before = _seconds_used(sweep) if math.isfinite(sweep.budget.usd) else 0.0
        self._why_ended = ""

    def run(self) -> SweepResult:
        self._trials.load(self._trials.num_started - 1)
        unfinished = [self._trials.unfinished[number] for number in sorted(self._trials.unfinished)]
        self._pending += [each for each in unfinished if each.number < self._sweep.trials]
        self._print_start()
        try:
            while self._go_on():
                time.sleep(POLL_S)
        except BaseException:
            self._stop_all()
            for each in self._running:
                each.process.wait()
            raise
        return self._result()

    def _go_on(self) -> bool:
        """Follow the running trials, and start others. Returns False if none runs any more."""
        for each in list(self._running):
            self._follow(each)
        if self._is_over():
            self._stop_all()
        else:
            while len(self._running) < self._num_jobs() and (trial := self._next()):
                self._begin(trial)
        return bool(self._running)

    def _next(self) -> Unfinished | None:
        if self._pending:
            return self._pending.popleft()
        return self._trials.ask() if self._trials.count < self._sweep.trials else None

    def _begin(self, trial: Unfinished) -> None:
        """Start a trial or resume it. A trial whose log already has its result needs no process."""
        folder = trial_folder(self._sweep, trial.number)
        values = ValueReader(RunFolder(folder).log, self._sweep.metric)
        self._report(trial, values)
        before = read_trial(folder)
        if trial.pruned_at is not None or (before.is_over and before.steps):
            self._finish(trial, values, before)
            return
        used = [each.device for each in self._running]
        device = min(self._devices, key=used.count, default=None)
        process = TrialProcess(
            self._sweep.recipe,
            self._sweep.settings_of(trial.params),
            folder,
            threads=self._sweep.threads,
            environ={**self._environ, **({"CUDA_VISIBLE_DEVICES": device} if device else {})},
            keep_open=[self._lock],
        )
        self._running.append(_Running(trial, process, values, device))

    def _report(self, trial: Unfinished, values: ValueReader) -> None:
        for step, value in values.read():
            if trial.pruned_at is None:
                self._trials.report(trial, step, value)

    def _follow(self, running: _Running) -> None:
        code = running.process.poll()  # polled before the log is read: the log is complete when the process has ended
        has_value = running.values.value is not None  # the first value shows that the run measures the metric
        if code is not None or self._sweep.pruner != "none" or not has_value:
            self._report(running.trial, running.values)
        if running.trial.pruned_at is not None:
            running.process.request_stop()
        if code is not None:
            self._running.remove(running)
            self._finish(running.trial, running.values, running.process.read())

    def _finish(self, trial: Unfinished, values: ValueReader, run: Trial) -> None:
        row = self._row(trial, values, run)
        if row.ended == "stopped":
            self._say(f"trial {trial.number} stopped at step {run.steps}; it can be resumed")
            return
        self._trials.finish(trial, row)
        value = "" if row.value is None else f"  {self._sweep.metric} {figure(row.value)}"
        params = "  ".join(f"{path}={shown(each)}" for path, each in trial.params.items())
        self._say(f"trial {trial.number:3}  {params}  {row.ended} at step {row.steps}{value}")
        rows = self._trials.rows()
        if len(rows) >= MAX_FAILED_AT_FIRST and all(each.ended == "failed" for each in rows):
            self._why_ended = f"the first {len(rows)} trials failed: {row.reason}"

    def _row(self, trial: Unfinished, values: ValueReader, run: Trial) -> TrialRow:
        if trial.pruned_at is not None:
            value: float | None = trial.values[trial.pruned_at]
            ended, steps = "pruned", trial.pruned_at
        else:
            value, steps = values.value, run.steps
            ended = "finished" if run.is_over and run.ended != "failed" else run.ended
        is_finite = value is not None and math.isfinite(value)
        if ended == "finished" and not is_finite:
            ended = "diverged" if value is not None else "failed"
        if ended in ("running", "not started"):
            ended = "stopped"
        reason = run.reason or ("killed: out of memory, perhaps" if ended in ("killed", "no end record") else "")
        if ended == "failed" and not reason:
            reason = "no value was measured"
        return TrialRow(
            trial.number,
            trial.params,
            value if is_finite and ended in ("finished", "pruned") else None,
            steps,
            run.seconds,
            "failed" if ended in ("killed", "no end record") else ended,
            tuple(each.code for each in run.findings if each.severity != "info"),
            reason[:500] if ended != "finished" else "",
            str(run.folder.relative_to(self._sweep.folder)),
        )

    def _stop_all(self) -> None:
        for each in self._running:
            each.process.request_stop()

    def _is_over(self) -> bool:
        elapsed_s, budget = time.monotonic() - self._began_s, self._sweep.budget
        price = self._sweep.usd_per_hour or 0.0
        if self._stop.is_set():
            self._why_ended = INTERRUPTED
        elif elapsed_s > budget.seconds:
            self._why_ended = f"the budget of {human_seconds(budget.seconds)} is spent"
        elif price * (self._seconds_before + elapsed_s) / 3600 > budget.usd:
            self._why_ended = f"the budget of {budget.usd:g} USD is spent"
        return bool(self._why_ended)

    def _num_jobs(self) -> int:
        """Return the number of concurrent trials. By default it is 1 until the first trial has written its plan."""
        if self._jobs is None and self._running:
            plan = RunFolder(self._running[0].process.folder).plan
            if plan.is_file():
                self._jobs = _jobs_by_plan(plan, self._sweep.threads)
                self._say(f"{self._jobs} trial{'s' if self._jobs > 1 else ''} at once")
        return self._jobs or 1

    def _print_start(self) -> None:
        sweep, done = self._sweep, len(self._trials.ended)
        for each in sweep.space:
            self._say(str(each))
        pruner = "" if sweep.pruner == "none" else f", {sweep.pruner} pruner"
        before = f", {done} of them have ended" if done else ""
        self._say(
            f"{sweep.trials} trials{before}: {sweep.sampler} sampler{pruner}, seed {sweep.seed}, in {sweep.folder}"
        )
        if sweep.jobs != 1 and (sweep.sampler == "tpe" or sweep.pruner != "none"):
            self._say("several at once: later trials depend on the order in which others end; --jobs 1 is repeatable")

    def _result(self) -> SweepResult:
        rows = self._trials.rows()
        for number in sorted(self._trials.unfinished):
            trial = self._trials.unfinished[number]
            run = read_trial(trial_folder(self._sweep, number))
            folder = str(run.folder.relative_to(self._sweep.folder))
            rows.append(TrialRow(number, trial.params, None, run.steps, run.seconds, "stopped", folder=folder))
        sweep = self._sweep
        table = ranked(rows, sweep.mode)
        result = SweepResult(
            sweep.folder,
            sweep.metric,
            sweep.mode,
            table,
            self._trials.importance(),
            self._why_ended,
            train_best(sweep, table),
        )
        write_results(sweep, result)
        return result


def _keep_spec(sweep: Sweep) -> None:
    """Write the sweep file into the folder. Raises UsageError if the folder contains another sweep."""
    path = sweep.folder / SPEC
    if path.is_file():
        changed = differences(spec_of(read_text(path)), spec_of(sweep.to_yaml()))
        if changed:
            raise UsageError(
                f"{sweep.folder} holds another sweep: {', '.join(changed)} differ",
                remedy=f"give this one another name (--name), or resume that one: trainwright sweep {sweep.folder}",
            )
    elif (sweep.folder / JOURNAL).exists() or (sweep.folder / "log.jsonl").exists():
        raise UsageError(f"{sweep.folder} contains other files", remedy="give the sweep another --name")
    write_atomically(path, sweep.to_yaml())


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[int]:
    """Hold the lock file ``path``. Trials inherit the lock, so it is free only after the last trial has ended."""
    descriptor = system_calls.open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        waited_s, has_said = 0.0, False
        while not _flock(descriptor):
            holder = _holder(descriptor)
            if holder is not None or waited_s > MAX_WAIT_S:
                raise UsageError(
                    f"another process runs this sweep{f': {holder}' if holder else ''}", remedy="wait for it, or end it"
                )
            if not has_said:
                say(f"waiting for {path.name}: trials of a process that has ended are saving ...")
                has_said = True
            time.sleep(POLL_S)
            waited_s += POLL_S
        os.ftruncate(descriptor, 0)
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        system_calls.write_at(descriptor, holder.encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _flock(descriptor: int) -> bool:
    try:
        return system_calls.try_lock(descriptor)
    except OSError:  # a file system without locks
        return True


def _holder(descriptor: int) -> str | None:
    """Return the process that holds the lock; None if it has ended and its trials still save."""
    with suppress(ValueError, KeyError, psutil.Error, TypeError):
        found = json.loads(system_calls.read_at(descriptor, 1000, 0))
        if found["host"] != socket.gethostname():
            return f"process {found['pid']} on {found['host']}"
        if psutil.Process(found["pid"]).status() != psutil.STATUS_ZOMBIE:
            return f"process {found['pid']}"
    return None


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Provide an event that SIGINT, SIGTERM and SIGUSR1 set. A second SIGINT raises KeyboardInterrupt."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    names = [name for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    before = {number: signal.signal(number, handle) for number in (getattr(signal, name) for name in names)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _devices(sweep: Sweep) -> list[str]:
    """Return the GPUs, one for each concurrent trial; empty for trials on the CPU."""
    if load(sweep.recipe, overrides=sweep.settings, environ={}).recipe.device == "cpu":
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [each.strip() for each in visible.split(",") if each.strip()]
    return [str(each.index) for each in read_machine().gpus]


def _seconds_used(sweep: Sweep) -> float:
    """Return the time in which at least one trial trained, by the logs of all trials."""
    trials = (read_trial(path.with_suffix("")) for path in (sweep.folder / "trials").glob("trial-*.json"))
    total_s, last_s = 0.0, -math.inf
    for began_s, end_s in sorted(span for trial in trials for span in trial.spans):
        total_s += max(0.0, end_s - max(began_s, last_s))
        last_s = max(last_s, end_s)
    return total_s


def _jobs_by_plan(plan: Path, threads: int) -> int:
    """Return the number of concurrent trials that cores and memory allow, by the plan of a trial that has begun."""
    try:
        held = read_as(plan, PlanFile).memory_bytes or {}
    except UnreadableFile:
        held = {}
    machine = read_machine()
    by_cores = machine.cores // threads
    by_memory = 1 + machine.available_bytes // (PROCESS_BYTES + sum(held.values()))
    return max(1, min(by_cores, by_memory))


AVERAGED_RECORDS = 10
"""Number of records over which the training loss of a trial is averaged, because the loss of one batch is noisy."""


class ValueReader:
    """Reads the new records of a log at each call. A step that a resume repeats counts once."""

    def __init__(self, log: Path, metric: str) -> None:
        self._log = log
        self._metric = metric
        self._position = 0
        self._last_step = 0
        self._recent: deque[float] = deque(maxlen=AVERAGED_RECORDS)
        self.value: float | None = None

    def read(self) -> list[tuple[int, float]]:
        """Return new values by step. Raises UsageError for a metric that the run does not measure."""
        if not self._log.is_file():
            return []
        with open_file(self._log) as file:
            file.seek(self._position)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._position += len(text)
        found = [self._of(each) for each in decode_lines(text.splitlines(keepends=True)).records]
        return [each for each in found if each is not None]

    def _of(self, record: Record) -> tuple[int, float] | None:
        if self._metric == TRAIN_LOSS:
            if not isinstance(record, Step) or record.step <= self._last_step:
                return None
            self._recent.append(record.loss)
            value = sum(self._recent) / len(self._recent)
        elif isinstance(record, Evaluated) and record.step > self._last_step:
            known = {VALIDATION_LOSS: record.loss, **record.metrics}
            if self._metric not in known:
                raise UsageError(
                    f"the validation has no metric {self._metric!r}", remedy=f"choose one of {', '.join(known)}"
                )
            value = known[self._metric]
        else:
            return None
        self._last_step, self.value = record.step, value
        return record.step, value


def sweep(
    what: Path | str,
    over: Mapping[str, object] | None = None,
    *,
    trials: int | None = None,
    sampler: Literal["grid", "random", "tpe"] | None = None,
    pruner: Literal["none", "median", "hyperband"] | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    seed: int | None = None,
    jobs: int | None = None,
    threads: int | None = None,
    budget: str | None = None,
    usd_per_hour: float | None = None,
    name: str | None = None,
    folder: Path | str | None = None,
    settings: Mapping[str, object] | None = None,
    quiet: bool = False,
) -> SweepResult:
    """Train a recipe with many settings, and rank the results.

    Each trial is a process and an ordinary run folder. The same call resumes a sweep that was killed.

    Args:
        what: A sweep file, the folder of a sweep, or a recipe.
        over: The varied recipe paths, each with a list of values, or a range such as ``"log:1e-4..1e-1"``,
            ``"0.0..0.5"`` and ``"int:2..8"``.
        trials: Number of trials. Default: all points of a grid, else 20.
        sampler: ``grid``, ``random`` or ``tpe``. Default: a grid if it has no more points than there are trials,
            else TPE.
        pruner: ``none``, or ``median`` or ``hyperband``, which stop trials that are worse than others at the same step.
        metric: ``loss`` (of the validation), ``train_loss``, or the name of a metric of the validation.
        mode: ``min`` or ``max``; required unless ``metric`` is a loss or a built-in metric.
        seed: The seed of the sampler. The trials have the seed of the recipe.
        jobs: Number of concurrent trials. Default: as many as cores and memory allow.
        threads: CPU threads of each trial, 1 by default. The number changes the last bits of a result.
        budget: ``"20min"``, ``"24"`` trials, or ``"5USD"``.
        usd_per_hour: The price of this machine, for a budget in USD.
        name: The name of the sweep and of its folder.
        folder: The parent of the folder of the sweep. Default: ``runs``.
        settings: Settings of all trials, by path.
        quiet: Print nothing.

    Returns:
        The table, the best trial and its recipe.

    Raises:
        RecipeError: The recipe or the sweep is wrong. The error lists every problem.
        UsageError: The folder holds another sweep.

    Example:
        >>> result = tw.sweep("demo-digits", {"optimizer.lr": "log:1e-3..1"}, trials=8)  # doctest: +SKIP
        >>> result.best.params  # doctest: +SKIP
    """
    found = read_sweep(
        Path(what),
        over=over,
        settings=[setting_of(path, value) for path, value in (settings or {}).items()],
        environ=os.environ,
        trials=trials,
        sampler=sampler,
        pruner=pruner,
        metric=metric,
        mode=mode,
        seed=seed,
        jobs=jobs,
        threads=threads,
        budget=budget,
        usd_per_hour=usd_per_hour,
        name=name,
        folder=None if folder is None else str(folder),
    )
    return run_sweep(found, say=(lambda _line: None) if quiet else print)
