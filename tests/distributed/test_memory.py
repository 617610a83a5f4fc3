"""How much memory is free, and what the flight recorder may hold of it."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch
from torch import nn

from tests import forked
from trainwright.distributed.memory import free_bytes, held_bytes, unfreed_bytes
from trainwright.recorder.ring import LEAST_BYTES, enough_bytes

LIMIT = 2**32
LIMITED = f"""
import resource, torch
from torch import nn
from trainwright.recorder.ring import enough_bytes
from trainwright.distributed.memory import free_bytes
resource.setrlimit(resource.RLIMIT_DATA, ({LIMIT}, {LIMIT}))
print(free_bytes(torch.device("cpu")), enough_bytes([nn.Linear(2**20, 2**20, device="meta")]))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set by Linux's RLIMIT_DATA")
def test_a_limit_of_the_process_leaves_less() -> None:
    done = forked.run(LIMITED)
    assert done.returncode == 0, done.stderr
    free, budget = map(int, done.stdout.split())
    assert 0 < free < LIMIT and LEAST_BYTES <= budget <= LIMIT // 4


def test_the_recorder_may_hold_three_states_and_no_more_than_a_quarter_of_what_is_free() -> None:
    small, middle, large = (nn.Linear(size, 2**14, bias=False, device="meta") for size in (2, 2**9, 2**24))
    assert enough_bytes([small]) == enough_bytes([]) == LEAST_BYTES
    if free_bytes(torch.device("cpu")) > 8 * 9 * middle.weight.nbytes:
        assert enough_bytes([middle]) == 9 * middle.weight.nbytes > LEAST_BYTES
    assert enough_bytes([large]) <= max(LEAST_BYTES, psutil.virtual_memory().total // 4)


def test_what_is_freed_does_not_count() -> None:
    cpu, size = torch.device("cpu"), 2**26
    before, resident = unfreed_bytes(), held_bytes(cpu)
    kept = torch.ones(size // 4)
    assert unfreed_bytes() - before == pytest.approx(size, rel=0.1)
    assert held_bytes(cpu) - resident == pytest.approx(size, rel=0.1)
    assert held_bytes(cpu) == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    del kept
    assert abs(unfreed_bytes() - before) < size // 10


FULL = """
import resource, sys
import torch
from pathlib import Path
from torch import nn
from trainwright.engine.recover import oom_snapshot
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.train_state import TrainState
model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2000)])
state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
def fill():
    held = []
    for size in (2**20, 2**16, 2**12, 600, 400, 200, 100, 50):
        try:
            while True:
                held.append(bytearray(size))
        except MemoryError:
            last = sys.exc_info()[1]
    raise last
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 8 * 2**20, resource.RLIM_INFINITY))
try:
    fill()
except MemoryError as error:
    seen = oom_snapshot(error, state, StepBatch(()))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(seen.in_use_bytes > 2**26, seen.phase, seen.held["weights"])
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set by Linux's rlimits")
def test_a_process_without_a_byte_left_can_say_what_held_it() -> None:
    done = forked.run(FULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "loss", "48000"]


GIVEN_BACK = """
import resource
from pathlib import Path
import torch
from trainwright.distributed.memory import give_back, return_large_blocks
def reserved():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() // 1024
torch.set_num_threads(1)
give_back(torch.device("cpu"))
return_large_blocks()
blocks, between = [], []
for _ in range(400):  # 64 KiB each, as activations of one sample are
    blocks.append(torch.empty(2**14))
    between.append(bytearray(600))
before = reserved()
blocks.clear()
print(before - reserved())
before = reserved()
for size in range(128, 1024, 128):
    torch.ones(size, 512) @ torch.ones(512, size)
taken = reserved() - before
give_back(torch.device("cpu"))
print(taken, reserved() - before, torch.backends.mkl.is_available())
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="glibc and /proc")
def test_where_memory_is_short_neither_the_heap_nor_kernels_keep_what_is_freed() -> None:
    done = forked.run(GIVEN_BACK)
    assert done.returncode == 0, done.stderr
    freed, (taken, kept, has_mkl) = done.stdout.splitlines()[0], done.stdout.splitlines()[1].split()
    assert int(freed) >= 380 * 64, "in KiB; a few blocks fill holes that the heap had before"
    if has_mkl == "True":
        assert int(taken) > 256 and int(kept) < int(taken) / 4


RETAINED = """
import ctypes, resource
from pathlib import Path
from trainwright.distributed.memory import retain_blocks, return_free_blocks
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [libc.malloc(2**20) for _ in range(64)]  # 64 activations of 1 MiB
    for each in held:
        ctypes.memset(each, 1, 2**20)
    for each in held:
        libc.free(each)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20
faults = faults_of_a_step()
retain_blocks()
first, second = faults_of_a_step(), faults_of_a_step()
kept = resident()
return_free_blocks()
print(faults, second, kept - resident())
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="glibc and /proc")
def test_a_step_finds_the_memory_of_the_step_before_it_and_the_end_of_a_run_returns_it() -> None:
    done = forked.run(RETAINED)
    assert done.returncode == 0, done.stderr
    faults, retained, returned_mib = map(int, done.stdout.split())
    assert faults > 64 * 2**20 // 4096 // 2 and retained < faults / 10
    assert returned_mib > 48
