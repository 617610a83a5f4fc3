"""Runs the trials of a sweep, several at once, and resumes a sweep that was killed."""

from __future__ import annotations

import fcntl
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

import psutil

from trainwright.errors import StorageError, UsageError
from trainwright.plan.explain import human_seconds
from trainwright.plan.machine import read_machine
from trainwright.recipe import load
from trainwright.runlog.figures import figure
from trainwright.runlog.files import UnreadableFile, read_text
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.shapes import PlanFile, read_as
from trainwright.runlog.storage import write_atomically
from trainwright.trials import Trial, TrialProcess, read_trial
from trainwright.verbs.sweep.result import INTERRUPTED, SweepResult, ranked, shown, write_results
from trainwright.verbs.sweep.spec import SPEC, Sweep, differences, spec_of, without_overrides
from trainwright.verbs.sweep.study import (
    JOURNAL,
    StudyTrials,
    TrialRow,
    Unfinished,
    quiet_optuna,
    require_optuna,
    trial_folder,
)
from trainwright.verbs.sweep.values import ValueSpace

POLL_S = 0.05
LOCK = "sweep.lock"
MAX_WAIT_S = 120.0
"""The trials of a killed sweep are given so long to save."""
PROCESS_BYTES = 700 * 2**20
"""Memory of a process that has imported torch, besides what the plan counts."""
MAX_FAILED_AT_FIRST = 3
"""A sweep whose first trials all fail ends after so many: the rest would fail too."""

Say = Callable[[str], None]


@dataclass
class _Running:
    """A trial in progress. ``device`` is the GPU that it has for itself, None on a CPU."""

    trial: Unfinished
    process: TrialProcess
    values: ValueSpace
    device: str | None


def run_sweep(sweep: Sweep, *, say: Say = print, environ: Mapping[str, str] | None = None) -> SweepResult:
    """Runs the trials of a sweep that are not over, and returns the table of all.

    Ctrl-C, SIGTERM and the end of the budget stop the trials in progress, which save; the same call goes on with them.
    Raises UsageError where the folder holds another sweep, or another process runs this one.
    """
    return _run(sweep, None, say, environ)


def run_one(sweep: Sweep, number: int, *, say: Say = print, environ: Mapping[str, str] | None = None) -> SweepResult:
    """Runs one trial of a sweep, as a job of its own: others share the journal on a common file system.

    The sampler and the pruner see the trials that are over when this one starts.
    """
    if not 0 <= number < sweep.trials:
        raise UsageError(f"the sweep has no trial {number}", remedy=f"give --trial 0 to --trial {sweep.trials - 1}")
    return _run(sweep, number, say, environ)


def _run(sweep: Sweep, only: int | None, say: Say, environ: Mapping[str, str] | None) -> SweepResult:
    require_optuna()
    _make_folder(sweep)
    with _locked(sweep, say, shared=only is not None) as lock, quiet_optuna(), _stopping() as stop:
        _keep_spec(sweep)
        return _Control(sweep, lock, stop, say, os.environ if environ is None else environ).run(only)


class _Control:
    """The loop of a sweep: starts trials, reads their values, prunes, and notes their ends."""

    def __init__(self, sweep: Sweep, lock: int, stop: threading.Event, say: Say, environ: Mapping[str, str]) -> None:
        self._sweep, self._lock, self._stop, self._say = sweep, lock, stop, say
        self._environ = without_overrides(environ)
        self._trials = StudyTrials(sweep)
        self._running: list[_Running] = []
        self._pending: deque[Unfinished] = deque()
        self._devices = _devices(sweep, environ)
        self._jobs = sweep.jobs or len(self._devices) or None
        self._began_s = time.monotonic()
        self._seconds_before = sum(row.seconds for row in self._trials.rows())
        self._why_ended = ""

    def run(self, only: int | None) -> SweepResult:
        """Runs all trials, or the one with the number ``only``."""
        if only is None:
            self._trials.load(self._trials.num_started - 1)
            unfinished = [self._trials.unfinished[number] for number in sorted(self._trials.unfinished)]
            self._pending += [each for each in unfinished if each.number < self._sweep.trials]
        elif only not in self._trials.over:
            self._pending.append(self._trials.load_only(only))
        self._tell_begin()
        try:
            while self._go_on(asks=only is None):
                time.sleep(POLL_S)
        except BaseException:
            self._stop_all()
            for each in self._running:
                each.process.wait()
            raise
        return self._result(only)

    def _go_on(self, *, asks: bool) -> bool:
        """Notes what happened, and starts what may start. Returns False when nothing runs and nothing is left."""
        for each in list(self._running):
            self._follow(each)
        if self._is_over():
            self._stop_all()
        else:
            while len(self._running) < self._num_jobs() and (trial := self._next(asks=asks)):
                self._begin(trial)
        return bool(self._running)

    def _next(self, *, asks: bool) -> Unfinished | None:
        if self._pending:
            return self._pending.popleft()
        return self._trials.ask() if asks and self._trials.count < self._sweep.trials else None

    def _begin(self, trial: Unfinished) -> None:
        """Starts a trial or resumes it. One whose log already decides its end needs no process."""
        folder = trial_folder(self._sweep, trial.number)
        values = ValueSpace(RunFolder(folder).log, self._sweep.metric)
        self._report(trial, values)
        before = read_trial(folder)
        if trial.pruned_at is not None or (before.is_over and before.steps):
            self._finish(trial, values, before)
            return
        taken = {each.device for each in self._running}
        device = next((each for each in self._devices if each not in taken), None)
        process = TrialProcess(
            self._sweep.recipe,
            self._sweep.settings_of(trial.params),
            folder,
            threads=self._sweep.threads,
            environ={**self._environ, **({"CUDA_VISIBLE_DEVICES": device} if device else {})},
            keep_open=[self._lock],
        )
        self._running.append(_Running(trial, process, values, device))

    def _report(self, trial: Unfinished, values: ValueSpace) -> None:
        for step, value in values.read():
            if trial.pruned_at is None:
                self._trials.report(trial, step, value)

    def _follow(self, running: _Running) -> None:
        code = running.process.poll()  # before the log is read: it is complete when the process has ended
        if code is not None or self._sweep.pruner != "none":
            self._report(running.trial, running.values)
        if running.trial.pruned_at is not None:
            running.process.ask_to_stop()
        if code is not None:
            self._running.remove(running)
            self._finish(running.trial, running.values, running.process.read())

    def _finish(self, trial: Unfinished, values: ValueSpace, run: Trial) -> None:
        row = self._row(trial, values, run)
        if row.ended == "stopped":
            self._say(f"trial {trial.number} stopped at step {run.steps}; it can go on")
            return
        self._trials.finish(trial, row)
        value = "" if row.value is None else f"  {self._sweep.metric} {figure(row.value)}"
        params = "  ".join(f"{path}={shown(each)}" for path, each in trial.params.items())
        self._say(f"trial {trial.number:3}  {params}  {row.ended} at step {row.steps}{value}")
        rows = self._trials.rows()
        if len(rows) >= MAX_FAILED_AT_FIRST and all(each.ended == "failed" for each in rows):
            self._why_ended = f"the first {len(rows)} trials failed: {row.reason}"

    def _row(self, trial: Unfinished, values: ValueSpace, run: Trial) -> TrialRow:
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
            each.process.ask_to_stop()

    def _is_over(self) -> bool:
        elapsed_s, budget = time.monotonic() - self._began_s, self._sweep.budget
        price = self._sweep.usd_per_hour or 0.0
        if self._stop.is_set():
            self._why_ended = INTERRUPTED
        elif elapsed_s > budget.seconds:
            self._why_ended = f"the budget of {human_seconds(budget.seconds)} is spent"
        elif price * (self._seconds_before / (self._jobs or 1) + elapsed_s) / 3600 > budget.usd:
            self._why_ended = f"the budget of {budget.usd:g} USD is spent"
        return bool(self._why_ended)

    def _num_jobs(self) -> int:
        """Trials at once. Unless it is given, the plan of the first trial says how many there is memory for."""
        if self._jobs is None and self._running:
            plan = RunFolder(self._running[0].process.folder).plan
            if plan.is_file():
                self._jobs = _jobs_by_plan(plan, self._sweep.threads)
                self._say(f"{self._jobs} trial{'s' if self._jobs > 1 else ''} at once")
        return self._jobs or 1

    def _tell_begin(self) -> None:
        sweep, done = self._sweep, len(self._trials.over)
        for each in sweep.space:
            self._say(str(each))
        pruner = "" if sweep.pruner == "none" else f", {sweep.pruner} pruner"
        before = f", {done} of them are over" if done else ""
        self._say(
            f"{sweep.trials} trials{before}: {sweep.sampler} sampler{pruner}, seed {sweep.seed}, in {sweep.folder}"
        )
        if sweep.jobs != 1 and (sweep.sampler == "tpe" or sweep.pruner != "none"):
            self._say("several at once: later trials depend on the order in which others end; --jobs 1 is repeatable")

    def _result(self, only: int | None) -> SweepResult:
        self._trials.refresh()
        rows = self._trials.rows()
        for number in sorted(self._trials.unfinished):
            trial = self._trials.unfinished[number]
            run = read_trial(trial_folder(self._sweep, number))
            folder = str(run.folder.relative_to(self._sweep.folder))
            rows.append(TrialRow(number, trial.params, None, run.steps, run.seconds, "stopped", folder=folder))
        sweep = self._sweep
        table = ranked(rows, sweep.mode)
        result = SweepResult(
            sweep.folder, sweep.metric, sweep.mode, table, self._trials.importance(), self._why_ended, only
        )
        write_results(sweep, result)
        return result


def _make_folder(sweep: Sweep) -> None:
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {sweep.folder}: {error}", remedy="choose another --folder") from None


def _keep_spec(sweep: Sweep) -> None:
    """Writes the file of the sweep into its folder. Raises UsageError where there is one of another sweep."""
    path = sweep.folder / SPEC
    if path.is_file():
        changed = differences(spec_of(read_text(path)), spec_of(sweep.to_yaml()))
        if changed:
            raise UsageError(
                f"{sweep.folder} holds another sweep: {', '.join(changed)} differ",
                remedy=f"give this one another name (--name), or go on with that one: trainwright sweep {sweep.folder}",
            )
    elif (sweep.folder / JOURNAL).exists() or (sweep.folder / "log.jsonl").exists():
        raise UsageError(f"{sweep.folder} holds something else", remedy="give the sweep another --name")
    write_atomically(path, sweep.to_yaml())


@contextmanager
def _locked(sweep: Sweep, say: Say, *, shared: bool) -> Iterator[int]:
    """Holds the lock of a sweep. The trials inherit it, so it is free when the last of them has ended."""
    descriptor = os.open(sweep.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        waited_s, has_said = 0.0, False
        while not _flock(descriptor, shared=shared):
            holder = _holder(descriptor)
            if holder is not None or waited_s > MAX_WAIT_S:
                raise UsageError(
                    f"another process runs this sweep{f': {holder}' if holder else ''}", remedy="wait for it, or end it"
                )
            if not has_said:
                say("the trials of the sweep before are saving ...")
                has_said = True
            time.sleep(POLL_S)
            waited_s += POLL_S
        if not shared:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            with suppress(
                FileNotFoundError
            ):  # left by a process that was killed while it wrote; nobody else writes now
                (sweep.folder / f"{JOURNAL}.lock").unlink()
        yield descriptor
    finally:
        os.close(descriptor)


def _flock(descriptor: int, *, shared: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _holder(descriptor: int) -> str | None:
    """The process that runs the sweep; None: it is gone, and its trials still save."""
    with suppress(ValueError, KeyError, psutil.Error, TypeError):
        found = json.loads(os.pread(descriptor, 1000, 0))
        if found["host"] != socket.gethostname():
            return f"process {found['pid']} on {found['host']}"
        if psutil.Process(found["pid"]).status() != psutil.STATUS_ZOMBIE:
            return f"process {found['pid']}"
    return None


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set. A second SIGINT raises KeyboardInterrupt."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _devices(sweep: Sweep, environ: Mapping[str, str]) -> list[str]:
    """The GPUs, of which each trial gets one; none for trials on the CPU."""
    if load(sweep.recipe, overrides=sweep.settings, environ={}).recipe.device == "cpu":
        return []
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [each.strip() for each in visible.split(",") if each.strip()]
    return [str(each.index) for each in read_machine().gpus]


def _jobs_by_plan(plan: Path, threads: int) -> int:
    """As many trials as cores and memory allow, by the plan of a trial that has begun."""
    try:
        held = read_as(plan, PlanFile).memory_bytes or {}
    except UnreadableFile:
        held = {}
    machine = read_machine()
    by_cores = machine.cores // threads
    by_memory = 1 + machine.available_bytes // (PROCESS_BYTES + sum(held.values()))
    return max(1, min(by_cores, by_memory))
