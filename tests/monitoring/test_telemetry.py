# ruff: noqa: N802, N815  (the names of NVML)
"""Telemetry reads this very machine, when it is due and not before."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult
from trainwright.monitoring.logbook import TelemetryReader, host_values
from trainwright.monitoring.nvml import Gpus
from trainwright.plan.machine import read_gpus
from trainwright.runs.reader import JOULES_PER_KWH, read
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

    def media(self, step: int, name: str, value: object) -> None:
        raise AssertionError("telemetry has no images")

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
    assert set(values) >= {
        prefix + name for name in ("busy_percent", "memory_bytes", "temperature_celsius", "power_watts")
    }
    assert 0 <= values[prefix + "memory_bytes"] <= present[0].memory_bytes


class FakeNvml:
    """Two GPUs by the functions of pynvml. GPU 1 has no energy counter and no ECC. Each reading takes a second."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES, NVML_CLOCK_MEM, nvmlEventTypeXidCriticalError = 0, 1, 1, 8

    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    nvlink_time_us = 0

    def __init__(self) -> None:
        self.energy_mj, self.xids, self.is_open, self.reasons = 5e6, [(0, 79)], False, 0x24

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetIndex(self, gpu: int) -> int:
        return gpu

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=87)

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(used=2**30)

    def nvmlDeviceGetTemperature(self, gpu: int, kind: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 650_000

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        return (1755, 2619)[kind]

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, counter: int) -> int:
        if gpu == 1:
            raise self.NVMLError("not supported")
        return 3

    def nvmlDeviceGetPcieThroughput(self, gpu: int, counter: int) -> int:
        return (10, 20)[counter]

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[tuple[int, int]]) -> list[SimpleNamespace]:
        assert all(scope == 2**32 - 1 for _, scope in fields)
        self.nvlink_time_us += 500_000 * (gpu == 0)
        kib = {138: self.nvlink_time_us // 1000, 139: self.nvlink_time_us // 500}
        return [
            SimpleNamespace(nvmlReturn=3 * gpu, timestamp=self.nvlink_time_us, value=SimpleNamespace(ullVal=kib[kind]))
            for kind, _ in fields
        ]

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: int) -> int:
        return self.reasons

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> float:
        if gpu == 1:
            raise self.NVMLError("not supported")
        return self.energy_mj

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, gpu: int, kinds: int, events: object) -> None: ...

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise self.NVMLError("timeout")
        gpu, xid = self.xids.pop(0)
        return SimpleNamespace(device=gpu, eventData=xid)


def test_readings_of_gpus_by_nvml() -> None:
    nvml = FakeNvml()
    gpus = Gpus([0, 1], nvml)
    nvml.energy_mj += 1.8e9  # half a kWh
    values = gpus.values()
    assert values["gpu0/energy_joules"] == 1.8e6 and "gpu1/energy_joules" not in values
    assert gpus.energy_kwh() == 0.5 == 1.8e6 / JOULES_PER_KWH and not gpus.measures_energy
    assert gpus.power_limit_watts() == 1400.0
    assert (values["gpu0/xid_errors"], values["gpu0/last_xid"], values["gpu0/ecc_uncorrected"]) == (1, 79, 3)
    assert "gpu1/xid_errors" not in values and "gpu1/ecc_uncorrected" not in values
    assert (values["gpu1/throttled_power_cap"], values["gpu1/throttled_thermal"]) == (1, 1)
    assert values["gpu1/throttled_hardware_slowdown"] == 0
    assert (values["gpu0/sm_clock_mhz"], values["gpu0/memory_clock_mhz"]) == (1755, 2619)
    assert (values["gpu0/pcie_sent_bytes_s"], values["gpu0/pcie_received_bytes_s"]) == (10_240, 20_480)
    assert not any("nvlink" in name for name in values), "there is no earlier reading to compare with"
    values = gpus.values()
    assert values["gpu0/xid_errors"] == 1  # it is not reported again
    assert (values["gpu0/nvlink_sent_bytes_s"], values["gpu0/nvlink_received_bytes_s"]) == (1_024_000, 2_048_000)
    assert "gpu1/nvlink_sent_bytes_s" not in values
    gpus.close()
    assert not nvml.is_open and gpus.values() == {}


def test_a_driver_of_which_much_is_missing_gives_what_it_has() -> None:
    class Old(FakeNvml):
        nvmlDeviceGetCurrentClocksEventReasons = property()  # raises AttributeError
        nvmlEventSetCreate = property()

        def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
            return 0x40

    values = Gpus([0], Old()).values()
    assert values["gpu0/throttled_hardware_thermal"] == 1 and values["gpu0/power_watts"] == 650
