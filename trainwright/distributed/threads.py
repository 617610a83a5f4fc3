"""Threads: one of ours must not slow training down; and the time of one, without what other programs take of it."""

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

STACK_BYTES = 2**18


@contextlib.contextmanager
def small_stacks() -> Iterator[None]:
    """A thread of ours that starts inside has a stack of 256 KiB: the usual 8 MiB count where memory is limited."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


def single_threaded() -> None:
    """Makes the calling thread run torch's operations by itself, without a pool of OpenMP threads of its own.

    Call it first thing in every thread that uses torch and stays alive while training runs. Otherwise the first large
    operation of that thread starts a pool that lives as long as the thread. libgomp then counts more threads than
    cores, and the threads of *training* sleep at every barrier instead of spinning: 526 voluntary context switches a
    step instead of none, and steps that take 1.2 times as long.

    ``torch.set_num_threads(1)`` is no cure: it also sets MKL, for the whole process. Does nothing where torch was built
    without OpenMP.
    """
    torch.get_num_threads()  # torch sets up each thread at its first use, and would undo what follows
    set_num_threads = _omp_set_num_threads()
    if set_num_threads is not None:
        set_num_threads(1)


@functools.cache
def _omp_set_num_threads() -> Callable[[int], object] | None:
    """The function of the OpenMP library that torch itself is linked to: a process may hold several."""
    function = getattr(torch_library(), "omp_set_num_threads", None)  # also found in what the library is linked to
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_int], None
    return function


@functools.cache
def torch_library() -> ctypes.CDLL | None:
    """The library that torch computes with on a CPU; None where the package has another layout."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
    return None


def undisturbed_s() -> float:
    """Seconds of a clock that stands still while this thread waits for a processor that another has.

    What reads from a disk or sleeps takes as long by it as by any clock, but a busy machine makes nothing slower. Where
    the system does not tell how long a thread has waited, which only Linux does, it is the ordinary clock.
    """
    waited_ns = _waited_ns()
    while True:
        now_s, before_ns = time.perf_counter(), waited_ns
        waited_ns = _waited_ns()
        if waited_ns == before_ns:  # else it waited between one clock and the other
            return now_s - 1e-9 * waited_ns


def _waited_ns() -> int:
    """What this thread has waited in all for a processor that another had."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return 0
