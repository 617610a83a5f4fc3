"""The memory of a device: what this process holds, what it may hold, and its peak."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from trainwright.distributed.threads import torch_library
from trainwright.plan.machine import read_machine

_STATM, _STATUS, _CLEAR = Path("/proc/self/statm"), Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 32 * 1024  # mallopt(3); to set it ends its growth with what is freed
_M_MMAP_MAX, _MOST_BLOCKS = -4, 2**15  # half of what Linux maps for a process; further ones are of the heap
_M_ARENA_MAX, _USUAL_BYTES = -8, 32 * 2**20  # where glibc's own threshold ends its growth
_OF_MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
_PEAK_OF_RSS = "5"  # proc(5): resets VmHWM


def held_bytes(device: torch.device) -> int:
    """On a GPU what live tensors take, else what of this process is in memory, Python and libraries included."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        with _STATM.open("rb", buffering=0) as file:  # psutil asks for 32 KiB, and this is asked when nothing is left
            return int(file.read(128).split()[1]) * mmap.PAGESIZE
    except FileNotFoundError:  # not Linux
        return int(psutil.Process().memory_info().rss)


class _Allocated(ctypes.Structure):
    """glibc's ``struct mallinfo2``, see mallinfo(3)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _OF_MALLINFO)


@functools.cache
def _mallinfo() -> Callable[[], _Allocated] | None:
    """None where the C library has none, or another allocator has taken its place."""
    try:
        call = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    call.restype = _Allocated
    seen: _Allocated = call()
    return call if seen.uordblks + seen.hblkhd > _private_bytes() // 4 else None


def _private_bytes() -> int:
    """What of this process is in memory, and no page of a file."""
    seen = psutil.Process().memory_info()
    return int(seen.rss - getattr(seen, "shared", 0))


def unfreed_bytes() -> int:
    """What this process has allocated on the host and not freed, Python's objects included.

    Unlike what is in memory, without freed blocks that the C library keeps, and without the pages of mapped files.
    Where the C library cannot tell, with freed blocks.
    """
    call = _mallinfo()
    return _private_bytes() - (0 if call is None else int(call().fordblks))


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
    return min([read_machine().available_bytes, *_left_by_rlimits()])


def capacity_bytes(device: torch.device) -> int:
    """What this process may hold in all as things are."""
    return held_bytes(device) + free_bytes(device)


def _left_by_rlimits() -> list[int]:
    return [max(0, limit - now) for used, limit in rlimits().items() if (now := _of_status(used)) is not None]


def _kinds() -> dict[str, int]:
    """Limits that count memory which is reserved, used or not, by the name of what they limit."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limits
        return {}
    return {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}


def rlimits() -> dict[str, int]:
    """The limits in force that count what is reserved, in bytes."""
    if not (kinds := _kinds()):
        return {}
    import resource

    soft = {used: resource.getrlimit(kind)[0] for used, kind in kinds.items()}
    return {used: limit for used, limit in soft.items() if limit != resource.RLIM_INFINITY}


@contextlib.contextmanager
def kept_free(num_bytes: int) -> Iterator[None]:
    """Inside, the limits in force are lower by ``num_bytes``."""
    if not (limited := rlimits()):
        yield
        return
    import resource

    before = {kind: resource.getrlimit(kind) for used, kind in _kinds().items() if used in limited}
    try:
        for kind, (soft, hard) in before.items():
            resource.setrlimit(kind, (max(0, soft - num_bytes), hard))
        yield
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)


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
    """Frees what is no longer used: cycles of objects, cached blocks, buffers of MKL. Takes some ten milliseconds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    free_buffers = getattr(torch_library(), "mkl_serv_thread_free_buffers", None)  # torch may be built without MKL
    if free_buffers is not None:
        free_buffers()  # of this thread: others may be computing
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def keep_no_blocks() -> None:
    """From here on glibc, where it is the allocator, returns every block of 32 KiB or more when it is freed.

    Else its heap would be in pieces before long, none of them large enough. It costs page faults (steps take 1.5 to 2
    times as long), in a process that is short of memory.
    """
    _mallopt(_M_MMAP_MAX, _MOST_BLOCKS)
    _mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def mind_limits() -> None:
    """Under a limit that counts what is reserved: no large block is kept, and new threads get no heap of 64 MiB."""
    if rlimits():
        _mallopt(_M_ARENA_MAX, 1)
        keep_no_blocks()


def keep_blocks() -> None:
    """The reverse of ``keep_no_blocks``."""
    _mallopt(_M_MMAP_THRESHOLD, _USUAL_BYTES)


def _mallopt(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(option, value)
