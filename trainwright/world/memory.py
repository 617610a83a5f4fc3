"""The memory of a device: what this process holds, what it may hold, and its peak."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path

import psutil
import torch

from trainwright.plan.machine import read_machine

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 128 * 1024  # mallopt(3); to set it ends its growth with what is freed
_PEAK_OF_RSS = "5"  # proc(5): resets VmHWM


def held_bytes(device: torch.device) -> int:
    """On a GPU what live tensors take, else what of this process is in memory, Python and libraries included."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def reserved_bytes(device: torch.device) -> int | None:
    """What torch's allocator has taken of a GPU, tensors or not; None elsewhere."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def allocator_retries(device: torch.device) -> int | None:
    """How often torch's allocator gave back all its cached blocks to the driver, to be given one; None elsewhere.

    Since the process began. The count lies on the host: nothing waits for the device.
    """
    if device.type != "cuda":
        return None
    count = torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries")
    return None if count is None else int(count)


def free_bytes(device: torch.device) -> int:
    """What this process may still allocate: on a CPU the least that machine, control group and rlimits leave."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(read_machine().available_bytes, *_left_by_rlimits())


def capacity_bytes(device: torch.device) -> int:
    """What this process may hold in all as things are."""
    return held_bytes(device) + free_bytes(device)


def _left_by_rlimits() -> list[int]:
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limits
        return [sys.maxsize]
    left = [sys.maxsize]
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and (now := _of_status(used)) is not None:
            left.append(max(0, soft - now))
    return left


def start_peak(device: torch.device) -> None:
    """Resets the peak that ``peak_bytes`` returns."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # not on this system: the peak is that of the whole process
            _CLEAR.write_text(_PEAK_OF_RSS)


def peak_bytes(device: torch.device) -> int:
    """The most that was held since ``start_peak``; on a GPU what the allocator had taken, free blocks included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return _of_status("VmHWM") or held_bytes(device)


def _of_status(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def give_back(device: torch.device) -> None:
    """Frees what is no longer used: cycles of objects, cached blocks. Takes some ten milliseconds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def keep_no_blocks() -> None:
    """From here on glibc, where it is the allocator, returns every large block when it is freed.

    Else its heap would be in pieces before long, none of them large enough. It costs page faults, in a process that is
    short of memory.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
