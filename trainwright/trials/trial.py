"""One trial: ``trainwright train RECIPE --set ...`` in a separate process, and its result from the run folder."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainwright.errors import StorageError, UsageError
from trainwright.runs.files import UnreadableFile, read_end_of_text
from trainwright.runs.findings import findings_in
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import read_course, state_of
from trainwright.runs.records import Ended, Evaluated, Found, Record, Started, Step
from trainwright.trials.child import EXIT_STOPPED

GRACE_S = 60.0
"""Seconds from SIGTERM to SIGKILL, for the step in progress and its checkpoint."""
OUTPUT_BYTES = 20_000
"""The bytes at the end of a trial's output that are read for the reason of a failure."""
_FOLDER_KEYS = ("folder", "name")
CHILD_PROGRAM = (
    "import sys; sys.argv[0] = 'trainwright'\n"
    "from trainwright.trials.child import end_with; end_with({parent})\n"
    "from trainwright.cli import main; main()"
)
"""Runs the command line in a process that ends with its ``{parent}``."""


@dataclass(frozen=True)
class Trial:
    """The result of one trial, read from its run folder.

    Args:
        folder: The run folder. It may not exist if the recipe was refused.
        settings: The overrides that the trial was started with, as ``path=value``.
        ended: finished, stopped, data_exhausted, failed, running, killed, or "not started".
        reason: Why it ended; the error of a trial that failed.
        steps: Number of completed optimizer steps.
        losses: Training losses as logged, by step.
        evaluations: Evaluations on the validation set, in their order.
        step_seconds: Seconds of each logged step.
        spans: For each process of the run, the first and the last time in its log, in seconds since the epoch.
        peak_bytes: The largest memory use that was logged.
        skipped: Number of skipped updates.
        findings: Findings of the doctor, the primary cause first.
    """

    folder: Path
    settings: tuple[str, ...]
    ended: str
    reason: str = ""
    steps: int = 0
    losses: tuple[tuple[int, float], ...] = ()
    evaluations: tuple[Evaluated, ...] = ()
    step_seconds: tuple[float, ...] = ()
    spans: tuple[tuple[float, float], ...] = ()
    peak_bytes: int = 0
    skipped: int = 0
    findings: tuple[Found, ...] = ()

    @property
    def is_over(self) -> bool:
        """True if the trial ended by itself; a trial that a signal stopped or killed can be resumed."""
        is_interrupted = self.ended == "stopped" and self.reason.partition(" ")[0] in signal.Signals.__members__
        return self.ended in ("finished", "data_exhausted", "failed", "stopped") and not is_interrupted

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last log record of each process of the run, added up."""
        return sum(end_s - began_s for began_s, end_s in self.spans)

    @property
    def val_loss(self) -> float:
        """The last validation loss; NaN if there is none."""
        return self.evaluations[-1].loss if self.evaluations else math.nan

    @property
    def step_s(self) -> float:
        """The median time of a logged step; NaN if there is none."""
        return statistics.median(self.step_seconds) if self.step_seconds else math.nan


def output_of(folder: Path) -> Path:
    """Return the file with the output of a trial's process. It is beside the run folder, which the trial creates."""
    return folder.with_name(f"{folder.name}.out")


def read_trial(folder: Path) -> Trial:
    """Read the run folder of a trial, which may still run. In a long run not every step is read."""
    run = RunFolder(folder)
    records = read_course(run.log) if os.path.lexists(run.log) else ()
    starts = [each for each in records if isinstance(each, Started)]
    if not starts:
        error = _error(folder)
        return Trial(folder, (), "failed" if error else "not started", error)
    steps = [each for each in records if isinstance(each, Step)]
    evaluations = tuple(each for each in records if isinstance(each, Evaluated))
    ends = [each for each in records if isinstance(each, Ended)]
    state = state_of(folder, records)
    return Trial(
        folder,
        _settings_in(starts[0].command),
        state,
        ends[-1].reason if ends and state == ends[-1].ending else "",
        max([0, *(each.step for each in steps), *(each.step for each in evaluations), *(each.step for each in ends)]),
        tuple((each.step, each.loss) for each in steps),
        evaluations,
        tuple(each.step_s for each in steps),
        _spans(records),
        max((each.mem_bytes for each in steps), default=0),
        max([0, *(each.skipped for each in steps), *(each.skipped for each in ends)]),
        tuple(findings_in(records)),
    )


def require_signals() -> None:
    """Raise UsageError on Windows: a trial is stopped by SIGTERM, and inherits the lock of its sweep."""
    if sys.platform == "win32":
        raise UsageError("trials need the signals of Linux or macOS", remedy="run this command in WSL 2")


class TrialProcess:
    """The process of a trial. It has its own session, so Ctrl-C does not reach it, and it ends with its parent."""

    def __init__(
        self,
        recipe: Path,
        settings: Sequence[str],
        folder: Path,
        *,
        threads: int = 1,
        environ: Mapping[str, str] | None = None,
        keep_open: Iterable[int] = (),
    ) -> None:
        """Start the trial, or resume it if ``folder`` holds a run.

        Args:
            recipe: The file of the recipe.
            settings: Overrides, as ``path=value``.
            folder: The run folder to create. Its name must be a valid name of a run.
            threads: CPU threads. The number changes the last bits of sums.
            environ: The environment; None: that of this process.
            keep_open: File descriptors that the child inherits.

        Raises StorageError if the parent folder cannot be written, and UsageError on Windows.
        """
        require_signals()
        self.folder = folder
        self._stop_requested_s = math.inf
        words = ["train", str(recipe)]
        is_resumed = _can_resume(folder)
        if is_resumed:
            words, settings = ["resume", str(folder)], ()
        else:
            _remove_draft(folder)
            settings = [*settings, f"folder={folder.parent}", f"name={folder.name}"]
        environ = dict(os.environ if environ is None else environ)
        beside = filter(None, (environ.get("PYTHONPATH"), str(Path(recipe).absolute().parent)))
        environ["OMP_NUM_THREADS"] = str(threads)
        environ["PYTHONPATH"] = os.pathsep.join(beside)  # a resume imports the modules beside the recipe
        words += [word for each in settings for word in ("--set", each)]
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with output_of(folder).open("ab" if is_resumed else "wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", CHILD_PROGRAM.format(parent=os.getpid()), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=tuple(keep_open),
                    env=environ,
                )
        except OSError as error:
            raise StorageError(f"cannot start a trial in {folder}: {error}", remedy="choose another folder") from None

    def poll(self) -> int | None:
        """Return the exit code; None if it runs.

        A process that does not stop when requested is killed after ``GRACE_S``.
        """
        code = self._process.poll()
        if code is None and time.monotonic() - self._stop_requested_s > GRACE_S:
            self.kill()
        return code

    def request_stop(self) -> None:
        """Request that the run saves after the step in progress and stops. Does nothing if it was requested before."""
        if self._stop_requested_s == math.inf:
            self._stop_requested_s = time.monotonic()
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process and those that it started, such as data workers."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, limit_s: float = math.inf) -> int:
        """Return the exit code. After ``limit_s`` seconds the run is stopped."""
        end_s = time.monotonic() + limit_s
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                self.request_stop()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(min(0.5, max(0.01, end_s - time.monotonic())))
        return code

    def read(self) -> Trial:
        """Read the result from the run folder, after the process has ended."""
        trial = read_trial(self.folder)
        if self._stop_requested_s != math.inf and trial.ended in ("killed", "no end record"):
            name = signal.Signals(-code).name if (code := self._process.returncode) < 0 else "SIGTERM"
            return replace(trial, ended="stopped", reason=f"{name} before it had saved")
        if self._process.returncode in (1, 2) and not trial.is_over:  # the resume was refused
            return replace(trial, ended="failed", reason=_error(self.folder))
        if trial.ended == "failed" and not trial.steps and self._process.returncode in (EXIT_STOPPED, -signal.SIGTERM):
            return Trial(self.folder, (), "not started")  # it was stopped before there was anything to save
        return trial


def run_trial(
    recipe: Path,
    settings: Sequence[str],
    folder: Path,
    *,
    threads: int = 1,
    limit_s: float = math.inf,
    environ: Mapping[str, str] | None = None,
) -> Trial:
    """Train a recipe with ``settings`` in a separate process.

    A run in ``folder`` that is over is only read; an interrupted one is resumed. An exception here, such as
    KeyboardInterrupt, also stops the run.

    Args:
        limit_s: Seconds after which the run saves and stops.
        recipe, settings, folder, threads, environ: See ``TrialProcess``.

    Raises:
        StorageError: The parent folder cannot be written.
    """
    before = read_trial(folder) if _can_resume(folder) else None
    if before is not None and before.is_over:
        return before
    process = TrialProcess(recipe, settings, folder, threads=threads, environ=environ)
    try:
        process.wait(limit_s)
    except BaseException:
        process.request_stop()
        process.wait()
        raise
    return process.read()


def _can_resume(folder: Path) -> bool:
    run = RunFolder(folder)
    return all(file.is_file() for file in (run.recipe, run.plan, run.provenance))


def _remove_draft(folder: Path) -> None:
    """Remove an incomplete run folder, left by a process that was killed early. It has no checkpoint."""
    if not folder.exists():
        return
    run = RunFolder(folder)
    if not folder.is_dir() or folder.is_symlink() or os.path.lexists(run.log) or run.checkpoints.exists():
        raise UsageError(f"{folder} is not a run that can be resumed", remedy="move it away, or choose another folder")
    shutil.rmtree(folder)


def _settings_in(command: Sequence[str]) -> tuple[str, ...]:
    pairs = itertools.pairwise(command)
    settings = (word for option, word in pairs if option == "--set")
    return tuple(each for each in settings if each.partition("=")[0] not in _FOLDER_KEYS)


def _spans(records: Sequence[Record]) -> tuple[tuple[float, float], ...]:
    spans = list[tuple[float, float]]()
    for record in records:
        if isinstance(record, Started):
            spans.append((record.time_s, record.time_s))
        elif spans:
            spans[-1] = (spans[-1][0], record.time_s)
    return tuple(spans)


def _error(folder: Path) -> str:
    """Return the error that a trial without a log printed: the text after the last ``error:``."""
    with suppress(UnreadableFile):
        text = read_end_of_text(output_of(folder), OUTPUT_BYTES)
        _, found, error = text.rpartition("error: ")
        return error.strip() if found else text.strip()[-500:]
    return ""
