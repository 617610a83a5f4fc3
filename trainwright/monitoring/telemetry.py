"""Reads host and GPUs at intervals: memory, disk, temperature, utilization."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from trainwright.distributed.memory import allocator_retries, held_bytes, reserved_bytes
from trainwright.monitoring.journal import Journal
from trainwright.monitoring.nvml import Gpus
from trainwright.monitoring.sinks import Sink
from trainwright.runs import records
from trainwright.runs.writer import LogWriter

if TYPE_CHECKING:
    import torch

    from trainwright.checkpoint.train_state import TrainState
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

    def observe(self, result: StepResult, state: TrainState) -> None:
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
    """Return readings of the host. ``cpu_percent`` is of one core (two busy cores are 200), since the last call."""
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
    own = f"{device.type}{device.index or 0}"
    return {
        f"{own}/allocator_retries": float(retries),
        f"{own}/allocated_bytes": float(held_bytes(device)),
        f"{own}/reserved_bytes": float(reserved),
    }
