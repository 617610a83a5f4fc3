"""Describes the local device like a row of the device table: a CPU by measurement, a GPU by its row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.plan.devices import Device, find_device, known_devices
from trainwright.plan.machine import Machine, read_machine
from trainwright.plan.roofline import peak_rate
from trainwright.plan.trace.blueprint import fake_copy
from trainwright.plan.trace.fake_tensors import fake_batch
from trainwright.plan.trace.traced_step import TracedObjects, trace_step

_MATRIX_SIDE = 1024
_COPY_VALUES = 1 << 24
_PROBE_S = 0.05


def nominal_cpu(machine: Machine) -> Device:
    """Return a CPU with nominal figures for its cores, for decisions that must be the same each time."""
    bf16 = {"avx512_bf16", "amx_bf16", "bf16"} & set(machine.cpu_flags)
    flops = {"fp32": 40e9 * machine.cores, **({"bf16": 80e9 * machine.cores} if bf16 else {})}
    return Device(
        "cpu",
        "cpu",
        machine.available_bytes,
        10e9 * min(machine.cores, 8),
        flops,
        source="nominal figures of its cores",
    )


def measured_cpu(machine: Machine) -> Device:
    """Return this CPU with measured rates of matrix products and copies. Takes about a quarter of a second.

    The rates are those of the fastest call, so that other programs have little effect on the choice of a layout.
    """
    flops = {"fp32": _matmul_flops(torch.float32)}
    if {"avx512_bf16", "amx_bf16", "bf16"} & set(machine.cpu_flags):
        flops["bf16"] = _matmul_flops(torch.bfloat16)
    one, other = torch.ones(_COPY_VALUES, device="cpu"), torch.empty(_COPY_VALUES, device="cpu")
    bandwidth = 2 * 4 * _COPY_VALUES / _seconds(lambda: other.copy_(one))
    few = torch.ones(8, device="cpu")
    launch_s = _seconds(lambda: few.add(1.0))
    return Device(
        "cpu",
        "cpu",
        machine.available_bytes,
        bandwidth,
        flops,
        source=f"the fastest measured here, with {torch.get_num_threads()} threads of {machine.cpu}",
        reach_flops=1.0,
        reach_bandwidth=1.0,
        launch_s=launch_s,
    )


def local_device(*, probe: bool = True) -> Device:
    """Return the first CUDA device, with its row in the table, else the CPU. ``memory_bytes`` is the memory free now.

    ``probe``: measure a CPU instead of returning nominal figures.

    A GPU that is not in the table gets the figures of the row nearest in memory, as ``source`` states.
    """
    if not torch.cuda.is_available():
        machine = read_machine()
        return measured_cpu(machine) if probe else nominal_cpu(machine)
    name = torch.cuda.get_device_name(0)
    free, total = torch.cuda.mem_get_info(0)
    return replace(table_row(name, total).with_memory(free), host_memory_bytes=read_machine().available_bytes)


def known_device(device: torch.device) -> Device | None:
    """Return the row of the table for a device of this machine; None for a CPU, and for a GPU that the table lacks."""
    if device.type != "cuda":
        return None
    rows = _rows_of(torch.cuda.get_device_name(device))
    return _nearest(rows, torch.cuda.mem_get_info(device)[1]) if rows else None


def table_row(name: str, memory_bytes: int) -> Device:
    """Return the row of the table for a GPU that the driver calls ``name``."""
    named = _rows_of(name)
    nearest = _nearest(named or [*known_devices().values()], memory_bytes)
    if named:
        return nearest
    return Device(
        name,
        "cuda",
        memory_bytes,
        nearest.bandwidth,
        nearest.flops,
        nearest.host_link,
        source=f"not in the table: figures of {nearest.name}",
    )


def _rows_of(name: str) -> list[Device]:
    words = name.lower().replace("-", " ").replace("rtx ", "rtx").split()
    return [device for device in known_devices().values() if device.name.split("-")[0] in words]


def _nearest(rows: Sequence[Device], memory_bytes: int) -> Device:
    return min(rows, key=lambda device: abs(device.memory_bytes - memory_bytes))


def named_device(name: str | None, table: dict[str, Device], memory_bytes: int | None) -> Device:
    """Return the device of --device and --memory; None is the local one. Raises UsageError for an unknown name."""
    if name is None or name == "cpu":
        device = measured_cpu(read_machine()) if name == "cpu" else local_device()
    else:
        device = find_device(name, table)
    return device if memory_bytes is None else device.with_memory(memory_bytes)


def _matmul_flops(dtype: torch.dtype) -> float:
    one = torch.ones(_MATRIX_SIDE, _MATRIX_SIDE, dtype=dtype, device="cpu")
    return 2 * _MATRIX_SIDE**3 / _seconds(lambda: one @ one)


def _seconds(action: Callable[[], object]) -> float:
    """Return the shortest time of one call, after one call to warm up."""
    action()
    best, end = float("inf"), time.perf_counter() + _PROBE_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def flops_of(parts: Parts, micro: MicroBatch) -> int:
    """Return the FLOPs of forward and backward of a micro-batch, without those repeated by activation checkpointing.

    They are counted under fake tensors. If the model cannot be copied or traced, its exception is passed on.
    """

    def make(place: torch.device) -> TracedObjects:
        return TracedObjects(fake_copy(parts.model, place), parts.loss, None, fake_batch(micro.data, place))

    trace = trace_step(make, device="cpu", clip=False)
    return sum(work.flops for work in trace.work if work.phase in ("forward", "backward"))


def peak_samples_s(parts: Parts, micro: MicroBatch, device: Device | None, precision: str) -> float | None:
    """Return the samples per second at the peak rate of ``device``, or None if the rate or the FLOPs are unknown."""
    if device is None or not micro.size:
        return None
    try:
        flops = flops_of(parts, micro)
    except Exception:  # a user's model may raise anything under fake tensors; then there is no figure
        return None
    return micro.size * peak_rate(device, precision) / flops if flops else None
