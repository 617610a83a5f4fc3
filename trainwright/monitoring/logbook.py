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
from typing import TYPE_CHECKING, Any

import psutil

from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.memory import allocator_retries, held_bytes, reserved_bytes
from trainwright.errors import OutOfMemoryError, StorageError, TrainwrightError, text_of
from trainwright.monitoring.cadence import Every
from trainwright.monitoring.journal import Journal
from trainwright.monitoring.media import MediaWriter
from trainwright.monitoring.nvml import Gpus
from trainwright.monitoring.sinks import Sink, SinkFactory, close_sinks, open_sinks
from trainwright.monitoring.step_log import StepLog
from trainwright.runs import records
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Ended, RunVerdict, Started
from trainwright.runs.secrets import masked
from trainwright.runs.writer import LogWriter

if TYPE_CHECKING:
    import torch

    from trainwright.engine.step import StepResult


class TelemetryReader:
    """An observer that writes at most one Telemetry record per ``every_s`` seconds, to the log and to the sinks.

    A step without a record costs one clock comparison (0.1 us). A record costs about 0.15 ms for the host, the counters
    of torch's allocator, and a dozen NVML calls per GPU, two of which count PCIe traffic for 20 ms each. The streams of
    the device are not synchronized.
    ``gpu_indices`` are NVML's numbers (``Machine.gpus[i].index``). ``clock`` decides when a record is due,
    ``wall_clock`` dates the records.
    """

    def __init__(
        self,
        log: Journal | LogWriter,
        sinks: Sequence[Sink],
        *,
        folder: Path,
        gpu_indices: Sequence[int] = (),
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._sinks = sinks
        self._folder = folder
        self._every_s = every_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call has nothing to compare with and returns 0
        self._gpus = Gpus(gpu_indices)
        self._due_s = clock()

    def observe(self, result: StepResult, _state: TrainState) -> None:
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + self._every_s
        values = host_values(self._process, self._folder) | self._gpus.values()
        values |= allocator_values(result.grad_norm.device)
        self._log.write(records.Telemetry(time_s=self._wall_clock(), step=result.step, values=values))
        for sink in self._sinks:
            sink.scalars(result.step, values)

    @property
    def energy_kwh(self) -> float | None:
        """Energy of the GPUs since this reader was made; None if they do not count it."""
        return self._gpus.energy_kwh() if self._gpus.measures_energy else None

    def close(self) -> None:
        """Release the driver. Log and sinks belong to their owner."""
        self._gpus.close()


def host_values(process: psutil.Process, folder: Path) -> dict[str, float]:
    """Return readings of the host. ``cpu_percent`` since the last call is 100 for one busy core, 200 for two."""
    values = {
        "host/process_memory_bytes": float(process.memory_info().rss),
        "host/process_cpu_percent": process.cpu_percent(),
        "host/available_memory_bytes": float(psutil.virtual_memory().available),
    }
    if folder.exists():  # the log reports a folder that was deleted during training
        values["host/disk_free_bytes"] = float(psutil.disk_usage(str(folder)).free)
    return values


def allocator_values(device: torch.device) -> dict[str, float]:
    """Return the counters of torch's allocator in this process, by torch's number of the device; empty for a CPU."""
    retries, reserved = allocator_retries(device), reserved_bytes(device)
    if retries is None or reserved is None:
        return {}
    name = f"{device.type}{device.index or 0}"
    return {
        f"{name}/allocator_retries": float(retries),
        f"{name}/allocated_bytes": float(held_bytes(device)),
        f"{name}/reserved_bytes": float(reserved),
    }


class Logbook:
    """A context manager that writes an Ended record when left, also after an exception. ``start`` writes Started.

    The caller sets ``ended`` before the exit. Otherwise the ending is ``failed``, with the exception as the reason. In
    both cases, Ended has the verdict that ``judge`` returns.
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
            self.journal,
            self.sinks,
            every,
            already_skipped=state.ledger.total,
            by_the_clock=by_the_clock,
            media=MediaWriter(folder.path, self.journal.write, self.sinks, warn),
        )
        self.telemetry = TelemetryReader(self.journal, self.sinks, folder=folder.path, gpu_indices=gpu_indices)
        self.ended: Ended | None = None
        self.judge: Callable[[Ended], RunVerdict | None] = lambda _ended: None

    @property
    def seconds(self) -> float:
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
        """Return the verdict; None if it cannot be computed, which must not hide how the run ended."""
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
