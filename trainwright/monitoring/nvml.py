"""Reads the sensors of NVIDIA GPUs with NVML: load, memory, power, energy, clocks, throttling, errors, PCIe, NVLink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from trainwright.runs.reader import JOULES_PER_KWH

T = TypeVar("T")
ALL_LINKS = 2**32 - 1
"""Scope id of an NVML field that selects the sum over all NVLinks."""
THROTTLE_REASONS = {
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
"""Bits of NVML's clock event reasons that mean lower clocks of a busy GPU, and their names in readings."""


class Gpus:
    """NVIDIA GPUs by NVML index. Readings that a GPU does not support are left out; without a driver, all are.

    ``nvml`` is the module ``pynvml``, or an object with the same functions.
    """

    def __init__(self, indices: Sequence[int], nvml: Any = None) -> None:
        self._handles: dict[int, Any] = {}
        self._initial_mj: dict[int, float] = {}
        self._nvlink: dict[int, tuple[float, ...]] = {}  # the last reading of the counters
        self._xids: dict[int, list[int]] = {}
        self._events: Any = None
        if not indices:
            return
        if nvml is None:
            import pynvml

            nvml = pynvml
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
        except nvml.NVMLError:  # no driver, or no such GPU
            return
        for index in self._handles:
            if (energy_mj := self._read(index, _energy_mj)) is not None:
                self._initial_mj[index] = energy_mj
        self._register_xid_events()

    def values(self) -> dict[str, float]:
        """Return all readings by name, such as ``gpu0/power_watts``."""
        self._read_xids()
        readings: dict[str, float] = {}
        for index in self._handles:
            for name, read in _READINGS.items():
                if (value := self._read(index, read)) is not None:
                    readings[f"gpu{index}/{name}"] = float(value)
            if (reasons := self._read(index, _throttle_reasons)) is not None:
                for bit, name in THROTTLE_REASONS.items():
                    readings[f"gpu{index}/throttled_{name}"] = float(bool(int(reasons) & bit))
            if index in self._initial_mj and (energy_mj := self._read(index, _energy_mj)) is not None:
                readings[f"gpu{index}/energy_joules"] = (energy_mj - self._initial_mj[index]) / 1000
            readings |= {f"gpu{index}/{name}": value for name, value in self._nvlink_rates(index).items()}
            if xids := self._xids.get(index):
                readings[f"gpu{index}/xid_errors"] = float(len(xids))
                readings[f"gpu{index}/last_xid"] = float(xids[-1])
        return readings

    def _nvlink_rates(self, index: int) -> dict[str, float]:
        """Return bytes per second over all NVLinks of a GPU since the last call; empty at the first call."""
        if (now := self._read(index, _nvlink_counters)) is None:
            return {}
        before, self._nvlink[index] = self._nvlink.get(index, now), now
        if (seconds := (now[0] - before[0]) / 1e6) <= 0:
            return {}
        sent, received = (1024 * (now[each] - before[each]) / seconds for each in (1, 2))
        return {"nvlink_sent_bytes_s": sent, "nvlink_received_bytes_s": received}

    @property
    def measures_energy(self) -> bool:
        """True if every GPU has an energy counter."""
        return bool(self._handles) and len(self._initial_mj) == len(self._handles)

    def energy_kwh(self) -> float:
        """Return the energy of all GPUs since this object was created. GPUs without a counter are left out."""
        now_mj = {index: self._read(index, _energy_mj) for index in self._initial_mj}
        used_mj = sum(now - self._initial_mj[index] for index, now in now_mj.items() if now is not None)
        return used_mj / 1000 / JOULES_PER_KWH

    def power_limit_watts(self) -> float | None:
        """Return the sum of the power limits; None if a GPU does not report its limit."""
        limits = [self._read(index, _power_limit_mw) for index in self._handles]
        known = [limit for limit in limits if limit is not None]
        return sum(known) / 1000 if known and len(known) == len(limits) else None

    def close(self) -> None:
        if self._handles:
            self._handles = {}
            self._nvml.nvmlShutdown()

    def _read(self, index: int, read: Callable[[Any, Any], T]) -> T | None:
        try:
            return read(self._nvml, self._handles[index])
        except (self._nvml.NVMLError, AttributeError):
            return None  # consumer cards and MIG slices lack some sensors; NVML removes deprecated functions

    def _register_xid_events(self) -> None:
        nvml = self._nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
            for handle in self._handles.values():
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except (nvml.NVMLError, AttributeError):  # not supported on every system
            self._events = None

    def _read_xids(self) -> None:
        """Record the Xid errors since the last call, without waiting."""
        nvml = self._nvml if self._events is not None else None
        while nvml is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                index = int(nvml.nvmlDeviceGetIndex(event.device))
            except (nvml.NVMLError, AttributeError):  # no more events
                return
            self._xids.setdefault(index, []).append(int(event.eventData))


def _energy_mj(nvml: Any, gpu: Any) -> float:
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))  # millijoules since the driver was loaded


def _nvlink_counters(nvml: Any, gpu: Any) -> tuple[float, ...]:
    """Return the time in microseconds, and KiB sent and received over all NVLinks since the driver was loaded."""
    kinds = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    fields = nvml.nvmlDeviceGetFieldValues(gpu, [(kind, ALL_LINKS) for kind in kinds])
    if failed := next((each.nvmlReturn for each in fields if each.nvmlReturn), 0):
        raise nvml.NVMLError(failed)
    return float(fields[0].timestamp), *(float(each.value.ullVal) for each in fields)


def _power_limit_mw(nvml: Any, gpu: Any) -> float:
    return float(nvml.nvmlDeviceGetEnforcedPowerLimit(gpu))


def _throttle_reasons(nvml: Any, gpu: Any) -> float:
    read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return float((read or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(gpu))


_READINGS: Mapping[str, Callable[[Any, Any], float]] = {
    "busy_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "temperature_celsius": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,  # NVML returns milliwatts
    "sm_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
    "ecc_uncorrected": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
        gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    ),
    # each of these two calls measures for 20 ms and returns KiB/s
    "pcie_sent_bytes_s": lambda nvml, gpu: 1024 * nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES),
    "pcie_received_bytes_s": lambda nvml, gpu: (
        1024 * nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES)
    ),
}
