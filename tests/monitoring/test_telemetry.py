"""Telemetry reads this very machine, when it is due and not before."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult
from trainwright.monitoring.logbook import Gpus, TelemetryReader, host_values
from trainwright.plan.machine import read_gpus
from trainwright.runs.reader import read
from trainwright.runs.records import Telemetry as TelemetryRecord
from trainwright.runs.writer import LogWriter


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def text(self, step: int, name: str, text: str) -> None:
        raise AssertionError("telemetry has no texts")

    def close(self, exit_code: int) -> None:
        raise AssertionError("whoever opened the sink closes it")


def result(step: int) -> StepResult:
    zero = torch.tensor(0.0)
    batch = StepBatch((MicroBatch(zero, np.arange(1)),))
    return StepResult(step, zero, zero, 0.1, 1.0, torch.tensor(False), batch)


def state() -> TrainState:
    model = torch.nn.Linear(1, 1)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_records_when_due_to_log_and_sinks(tmp_path: Path) -> None:
    now_s = [100.0]
    log, sink = LogWriter(tmp_path / "log.jsonl"), Kept()
    telemetry = TelemetryReader(
        log, [sink], folder=tmp_path, every_s=10.0, clock=lambda: now_s[0], wall_clock=lambda: now_s[0] + 1e9
    )
    for step, at_s in [(1, 100.0), (2, 105.0), (3, 109.99), (4, 110.0), (5, 119.0), (6, 150.0), (7, 151.0)]:
        now_s[0] = at_s
        telemetry.observe(result(step), state())
    telemetry.close()
    telemetry.close()
    log.close()
    seen = read(tmp_path / "log.jsonl").records
    assert [(r.step, r.time_s) for r in seen if isinstance(r, TelemetryRecord)] == [
        (1, 1e9 + 100.0),
        (4, 1e9 + 110.0),
        (6, 1e9 + 150.0),
    ]
    assert [(r.step, r.values) for r in seen if isinstance(r, TelemetryRecord)] == sink.rows


def test_host_values_are_those_of_this_process(tmp_path: Path) -> None:
    process = psutil.Process()
    process.cpu_percent()
    before = host_values(process, tmp_path)["host/process_memory_bytes"]
    ballast = b"1" * 200_000_000
    values = host_values(process, tmp_path)
    assert values["host/process_memory_bytes"] - before > 0.9 * len(ballast)
    assert 0 < values["host/available_memory_bytes"] < psutil.virtual_memory().total
    assert 0 < values["host/disk_free_bytes"] <= shutil.disk_usage(tmp_path).total
    assert values["host/process_cpu_percent"] >= 0


def test_a_deleted_folder_is_no_reason_to_stop(tmp_path: Path) -> None:
    assert "host/disk_free_bytes" not in host_values(psutil.Process(), tmp_path / "gone")


def test_gpus_that_are_not_there_say_nothing() -> None:
    gpus = Gpus([4096])
    assert gpus.values() == {}
    gpus.close()


def test_gpus_that_are_there_say_all() -> None:
    present = read_gpus(None)
    if not present:
        pytest.skip("no NVIDIA GPU here")
    gpus = Gpus([present[0].index])
    values = gpus.values()
    gpus.close()
    prefix = f"gpu{present[0].index}/"
    assert set(values) == {
        prefix + name for name in ("busy_percent", "memory_bytes", "temperature_celsius", "power_watts")
    }
    assert 0 <= values[prefix + "memory_bytes"] <= present[0].memory_bytes
