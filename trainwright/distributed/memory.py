"""Memory of a device: held by this process, and still available."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from trainwright.distributed.threads import torch_library
from trainwright.plan.machine import read_machine

_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD, _MIN_MAPPED_BYTES = -3, 32 * 1024  # mallopt(3); setting it stops its automatic growth
# half of the mappings that Linux allows a process; further blocks use the heap
_M_MMAP_MAX, _MAX_MAPPED_BLOCKS = -4, 2**15
_M_ARENA_MAX, _MAX_HEAP_BLOCK_BYTES = -8, 32 * 2**20  # glibc maps each larger block separately in any case
_M_TRIM_THRESHOLD, _MAX_FREE_HEAP_BYTES = -1, 2**31 - 1
_MALLINFO_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


def held_bytes(device: torch.device) -> int:
    """Return the bytes of live tensors on a GPU, else the resident memory of this process, including Python and
    libraries.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _resident_and_shared_bytes()[0]


def _resident_and_shared_bytes() -> tuple[int, int]:
    """Return the resident memory of this process in bytes, and the part of it that are pages of files."""
    try:
        # psutil allocates 32 KiB, and this is called when no memory is left; between steps it takes 0.2 ms
        with _STATM.open("rb", buffering=0) as file:
            resident, shared = map(int, file.read(128).split()[1:3])
            return resident * mmap.PAGESIZE, shared * mmap.PAGESIZE
    except FileNotFoundError:  # not Linux
        seen = psutil.Process().memory_info()
        return int(seen.rss), int(getattr(seen, "shared", 0))


class _Allocated(ctypes.Structure):
    """glibc's ``struct mallinfo2``, see mallinfo(3)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO_FIELDS)


@functools.cache
def _mallinfo() -> Callable[[], _Allocated] | None:
    """Return the function, or None if the C library lacks it or another allocator replaces glibc's."""
    try:
        call = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    call.restype = _Allocated
    seen: _Allocated = call()
    return call if seen.uordblks + seen.hblkhd > _private_bytes() // 4 else None


def _private_bytes() -> int:
    """Return the resident memory of this process without pages of files, in bytes."""
    resident, shared = _resident_and_shared_bytes()
    return resident - shared


def unfreed_bytes() -> int:
    """Return the bytes that this process has allocated on the host and not freed, including Python's objects.

    Unlike resident memory, this excludes freed blocks that the C library retains, and pages of mapped files. If the C
    library does not report freed blocks, they are included.
    """
    call = _mallinfo()
    return _private_bytes() - (0 if call is None else int(call().fordblks))


def reserved_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that torch's allocator has reserved, with or without tensors; None elsewhere."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else None


def allocator_retries(device: torch.device) -> int | None:
    """Return how often torch's allocator returned all its cached blocks to the driver to allocate one; None elsewhere.

    Counted since the start of the process. The count is on the host: nothing waits for the device.
    """
    if device.type != "cuda":
        return None
    count = torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries")
    return None if count is None else int(count)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process may still allocate; on a CPU the minimum of machine, control group and
    rlimits.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min([read_machine().available_bytes, *_left_by_rlimits()])


def capacity_bytes(device: torch.device) -> int:
    """Return the total bytes that this process may currently hold."""
    return held_bytes(device) + free_bytes(device)


def _left_by_rlimits() -> list[int]:
    return [max(0, limit - now) for used, limit in rlimits().items() if (now := _read_status(used)) is not None]


def rlimits() -> dict[str, int]:
    """Return the active limits on reserved memory in bytes, by the key of the limited value in /proc/self/status."""
    try:
        import resource
    except ImportError:  # on Windows, which has no such limits
        return {}
    kinds = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
    soft = {used: resource.getrlimit(kind)[0] for used, kind in kinds.items()}
    return {used: limit for used, limit in soft.items() if limit != resource.RLIM_INFINITY}


def _read_status(name: str) -> int | None:
    try:
        lines = _STATUS.read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def give_back(device: torch.device) -> None:
    """Free unused memory: reference cycles, cached blocks, buffers of MKL. Takes some ten milliseconds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    free_buffers = getattr(torch_library(), "mkl_serv_thread_free_buffers", None)  # torch may be built without MKL
    if free_buffers is not None:
        free_buffers()  # of this thread, because others may be computing
    return_free_blocks()


def return_free_blocks() -> None:
    """Return the free memory of glibc's heap to the system, if glibc is the allocator. Takes milliseconds."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def return_large_blocks() -> None:
    """Make glibc return every block of 32 KiB or more when it is freed, if it is the allocator.

    Otherwise the heap of a process that is short of memory would soon be fragmented, without large free blocks. This
    costs page faults: steps take 1.5 to 2 times as long.
    """
    _mallopt(_M_MMAP_MAX, _MAX_MAPPED_BLOCKS)
    _mallopt(_M_MMAP_THRESHOLD, _MIN_MAPPED_BYTES)


def adapt_to_limits() -> None:
    """If reserved memory is limited, return large blocks when they are freed, and reserve no 64 MiB heap per thread."""
    if rlimits():
        _mallopt(_M_ARENA_MAX, 1)
        return_large_blocks()


def retain_blocks() -> None:
    """Make glibc keep freed blocks of up to 32 MiB for later ones, if it is the allocator.

    A step on a CPU frees its activations. By default glibc returns free memory at the end of its heap to the system, so
    the next step has page faults in all of it: 5 % of the time of a small language model. Reverses
    ``return_large_blocks``.
    """
    _mallopt(_M_TRIM_THRESHOLD, _MAX_FREE_HEAP_BYTES)
    _mallopt(_M_MMAP_THRESHOLD, _MAX_HEAP_BLOCK_BYTES)


def _mallopt(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(option, value)
