"""Keeps background threads from slowing down training; a clock that leaves out the time of other programs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

THREAD_STACK_BYTES = 2**18


@contextlib.contextmanager
def small_stacks() -> Iterator[None]:
    """Context in which new threads have a stack of 256 KiB: the default of 8 MiB matters if memory is limited."""
    before = threading.stack_size(THREAD_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


def single_threaded() -> None:
    """Make the calling thread run torch's operations by itself, without a separate pool of OpenMP threads.

    Call it first in every thread that uses torch and stays alive while training runs. Otherwise the first large
    operation of that thread starts a pool that lives as long as the thread. libgomp then counts more threads than
    cores, and the threads of *training* sleep at every barrier instead of spinning: 526 voluntary context switches per
    step instead of none, and steps that take 1.2 times as long.

    ``torch.set_num_threads(1)`` does not help: it also sets the threads of MKL, for the whole process. Does nothing if
    torch was built without OpenMP.
    """
    torch.get_num_threads()  # torch sets up each thread at its first use, and would undo what follows
    set_num_threads = _omp_set_num_threads()
    if set_num_threads is not None:
        set_num_threads(1)


@functools.cache
def _omp_set_num_threads() -> Callable[[int], object] | None:
    """Return the function of the OpenMP library that torch is linked to: a process may contain several."""
    # the lookup includes the libraries that torch's library is linked to
    function = getattr(torch_library(), "omp_set_num_threads", None)
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_int], None
    return function


@functools.cache
def torch_library() -> ctypes.CDLL | None:
    """Return torch's CPU library; None if the package has another layout."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
    return None


def undisturbed_s() -> float:
    """Return seconds of a clock that stops while this thread waits for a processor that another thread uses.

    The clock counts reading from a disk and sleeping, but no time that is lost because the machine is busy. Only Linux
    reports the waiting time; on other systems it is the ordinary clock.
    """
    waited_ns = _waited_ns()
    while True:
        now_s, before_ns = time.perf_counter(), waited_ns
        waited_ns = _waited_ns()
        if waited_ns == before_ns:  # else it waited between the two readings
            return now_s - 1e-9 * waited_ns


def _waited_ns() -> int:
    """Return the total time for which this thread has waited for a processor, in nanoseconds."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text("utf-8").split()[1])
    return 0
