"""Reads the machine's cores, memory, CPU features and NVIDIA GPUs, without torch.

A container or a batch scheduler may grant less than the hardware has; the granted amounts are reported. Functions
named ``parse_*`` take the text of a system file, so that tests can cover other machines.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

# CPU features that decide which kernels and which precision pay off: the name in /proc/cpuinfo -> our name.
_FLAGS = {
    **{flag: flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16")},
    "asimd": "neon",
    "bf16": "bf16",  # ARM's; x86 has no flag of this name
}
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned number


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU that this process may use. ``index`` is its NVML index (PCI bus order)."""

    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    driver: str


@dataclass(frozen=True)
class Machine:
    """One machine. ``cores`` and memory are the amounts that affinity and cgroup grant this process."""

    cores: int
    memory_bytes: int
    available_bytes: int
    cpu: str
    cpu_flags: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Limits:
    """The limits of the control groups; infinity means no limit. The file cache counts as unused."""

    cpus: float = math.inf
    memory_bytes: float = math.inf
    unused_bytes: float = math.inf


def read_machine() -> Machine:
    """Read the facts of this machine (about 1 ms, plus the start of NVML if there is an NVIDIA driver)."""
    limits = read_limits(Path("/sys/fs/cgroup"), _text(Path("/proc/self/cgroup")) or "")
    memory = psutil.virtual_memory()
    name, flags = parse_cpuinfo(_text(Path("/proc/cpuinfo")) or "")
    return Machine(
        cores=max(1, math.floor(min(_affinity(), limits.cpus))),
        memory_bytes=int(min(memory.total, limits.memory_bytes)),
        available_bytes=int(min(memory.available, limits.unused_bytes)),
        cpu=name or platform.processor() or platform.machine(),
        cpu_flags=flags,
        gpus=read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
    )


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the name ("" if absent) and the relevant features of the first core in /proc/cpuinfo, x86 or ARM."""
    first: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            first.setdefault(key.strip(), value.strip())
    name = first.get("model name", "")
    if not name and "CPU implementer" in first:  # on ARM, Linux reports numbers, not names
        name = f"ARM implementer {first['CPU implementer']} part {first.get('CPU part', '?')}"
    flags = (first.get("flags") or first.get("Features") or "").split()
    return name, tuple(sorted(_FLAGS[flag] for flag in set(flags) & set(_FLAGS)))


def parse_cgroup_paths(text: str) -> dict[str, str]:
    """Return controller -> path from /proc/self/cgroup. The unified hierarchy (v2) has the controller ""."""
    paths = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def parse_cpu_quota(quota: str, period: str) -> float:
    """Return CPUs from v2's cpu.max or v1's cpu.cfs_quota_us and cpu.cfs_period_us. ``max`` and -1 are no limit."""
    return math.inf if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


def parse_memory_limit(text: str) -> float:
    """Return bytes from memory.max (v2) or memory.limit_in_bytes (v1)."""
    if text.strip() == "max" or int(text) >= _UNLIMITED_BYTES:
        return math.inf
    return int(text)


def parse_cache_bytes(text: str) -> int:
    """Return the file cache that the kernel frees on demand, from memory.stat: the group's and its children's."""
    rows = dict(line.split() for line in text.splitlines())
    return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))  # total_ is v1's name for it


def read_limits(root: Path, self_cgroup: str) -> Limits:
    """Return the smallest limits from this process's control group up to ``root`` (/sys/fs/cgroup).

    In a container the path may name the host's tree, which is not mounted; then only ``root`` itself
    exists, and that is the container's own group.
    """
    paths = parse_cgroup_paths(self_cgroup)
    cpus = memory = unused = math.inf
    for group in _upwards(root, paths.get("", "/")):
        if (text := _text(group / "cpu.max")) is not None:
            cpus = min(cpus, parse_cpu_quota(*text.split()))
        limit, left = _memory_of(group, "memory.max", "memory.current")
        memory, unused = min(memory, limit), min(unused, left)
    for group in _upwards(root / "cpu", paths.get("cpu", "/")):
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota is not None and period is not None:
            cpus = min(cpus, parse_cpu_quota(quota.strip(), period))
    for group in _upwards(root / "memory", paths.get("memory", "/")):
        limit, left = _memory_of(group, "memory.limit_in_bytes", "memory.usage_in_bytes")
        memory, unused = min(memory, limit), min(unused, left)
    return Limits(cpus, memory, unused)


def select_visible(uuids: Sequence[str], visible: str | None) -> list[int]:
    """Return the positions in ``uuids`` that CUDA_VISIBLE_DEVICES makes visible; None: it is not set.

    As in CUDA, entries are numbers or prefixes of UUIDs, and the first invalid entry ends the list. Numbers
    count in PCI bus order, which is CUDA's order on machines with equal GPUs.
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in visible.split(","):
        matches = [
            position
            for position, uuid in enumerate(uuids)
            if entry.strip() == str(position) or (entry.strip().startswith("GPU-") and uuid.startswith(entry.strip()))
        ]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


def read_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that ``visible`` (CUDA_VISIBLE_DEVICES) makes visible; () without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or a driver that does not match the kernel module
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        return tuple(_gpu(pynvml, index, handles[index]) for index in select_visible(uuids, visible))
    except pynvml.NVMLError:  # a GPU that has fallen off the bus does not answer
        return ()
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handle: object) -> Gpu:
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        driver=nvml.nvmlSystemGetDriverVersion(),
    )


def _affinity() -> int:
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield ``root/path`` and every folder above it up to ``root``, whether or not they exist."""
    inner = root / path.lstrip("/")
    yield inner
    while inner != root:
        inner = inner.parent
        yield inner


def _memory_of(group: Path, limit_name: str, usage_name: str) -> tuple[float, float]:
    """Return the limit and the unused part of it, in bytes."""
    limit_text, usage_text = _text(group / limit_name), _text(group / usage_name)
    if limit_text is None or usage_text is None:
        return math.inf, math.inf
    limit = parse_memory_limit(limit_text)
    used = int(usage_text) - parse_cache_bytes(_text(group / "memory.stat") or "")
    return limit, max(0.0, limit - used)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except OSError:  # absent on this system, not mounted, or not readable
        return None
