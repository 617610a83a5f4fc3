"""Opens and closes log, sinks and telemetry of one run together."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from trainwright.checkpoint.train_state import TrainState
from trainwright.errors import OutOfMemoryError, StorageError, TrainwrightError, text_of
from trainwright.monitoring.cadence import Every
from trainwright.monitoring.journal import Journal
from trainwright.monitoring.sinks import SinkFactory, close_sinks, open_sinks
from trainwright.monitoring.step_log import StepLog
from trainwright.monitoring.telemetry import TelemetryReader
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Ended, RunVerdict, Started
from trainwright.runs.secrets import masked
from trainwright.runs.writer import LogWriter


class Logbook:
    """A context that writes Started when entered and Ended when left, also after an exception.

    The caller sets ``ended`` before the exit. Without it, an exception is recorded as ``failed`` with its reason. Both
    have the verdict that ``judge`` returns.
    """

    def __init__(
        self,
        folder: RunFolder,
        every: Every,
        *,
        sinks: Mapping[str, SinkFactory],
        config: Mapping[str, Any],
        state: TrainState,
        gpu_indices: Sequence[int],
        by_the_clock: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._from_step, self._folder, self._begin_s = state.step, folder, time.perf_counter()
        self._warn = warn
        self.journal = Journal(LogWriter(folder.log), warn)
        self.sinks = open_sinks(sinks, folder.path, masked(config), warn=warn, from_step=state.step)
        self.recorder = StepLog(
            self.journal, self.sinks, every, already_skipped=state.ledger.total, by_the_clock=by_the_clock
        )
        self.telemetry = TelemetryReader(self.journal, self.sinks, folder=folder.path, gpu_indices=gpu_indices)
        self.ended: Ended | None = None
        self.judge: Callable[[Ended], RunVerdict | None] = lambda _ended: None

    @property
    def seconds(self) -> float:
        """Seconds since it was opened."""
        return time.perf_counter() - self._begin_s

    def start(
        self,
        version: str,
        resumed_from: Path | None,
        died_in_step: int | None = None,
        accepted: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Write the record of a process that begins or continues the run."""
        self.journal.write(
            Started(
                time_s=time.time(),
                step=self._from_step,
                version=version,
                pid=os.getpid(),
                resumed_from=resumed_from.name if resumed_from else None,
                command=tuple(sys.argv),
                died_in_step=died_in_step,
                accepted=tuple(accepted),
                settings=dict(settings or {}),
            )
        )

    def __enter__(self) -> Logbook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = self.ended is None
        if self.ended is None:
            reason = "" if error is None else text_of(error)
            self._keep_traceback(error)
            self.ended = Ended(
                time_s=time.time(),
                ending="failed",
                reason=reason,
                step=self.recorder.step,
                loss=None,
                val_loss=None,
                skipped=self.recorder.num_skipped,
                seconds=self.seconds,
            )
        if isinstance(error, OutOfMemoryError):
            self.recorder.out_of_memory(error.reports)
        self.ended = replace(self.ended, verdict=self._verdict_on(self.ended))
        self.journal.write(self.ended)
        close_sinks(self.sinks, int(failed))
        self.journal.close()

    def _verdict_on(self, ended: Ended) -> RunVerdict | None:
        """Return the verdict; None if that fails, which must not hide how the run ended. Readers of the log then
        compute it.
        """
        try:
            return self.judge(ended)
        except Exception as error:
            self._warn(f"no verdict: {type(error).__name__}: {text_of(error)[:200]}")
            return None

    def _keep_traceback(self, error: BaseException | None) -> None:
        """Write error.txt to the run folder, for errors without a remedy."""
        if error is None or isinstance(error, TrainwrightError | KeyboardInterrupt):
            return
        with contextlib.suppress(StorageError):
            self._folder.write_text("error.txt", masked("".join(traceback.format_exception(error))))
