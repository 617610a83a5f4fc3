"""A thread of ours has no pool of OpenMP threads: counted, not timed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed import threads
from trainwright.distributed.threads import single_threaded, undisturbed_s
from trainwright.monitoring.saving import SavePolicy, Saving

POOL = 3
LARGE = 1_000_000  # elements; torch splits an operation from 32,768 on


def num_threads() -> int:
    return int(psutil.Process().num_threads())


def fill() -> None:
    torch.empty(LARGE).zero_()


def in_thread(*calls: Callable[[], Any]) -> Any:
    """Calls each in turn in one thread of its own, whose pool ends with it; returns what the last one returned."""
    torch.set_num_threads(POOL)
    with ThreadPoolExecutor(1) as thread:
        return [thread.submit(call).result() for call in calls][-1]


needs_libgomp = pytest.mark.skipif("openmp" not in torch.__config__.parallel_info().lower(), reason="no OpenMP")


@needs_libgomp
def test_a_thread_that_says_so_starts_no_pool() -> None:
    before = num_threads()
    plain: int = in_thread(fill, num_threads)
    end_s = time.monotonic() + 10
    while num_threads() > before and time.monotonic() < end_s:  # the pool ends just after its thread
        time.sleep(0.001)
    alone: int = in_thread(single_threaded, fill, num_threads)
    assert (plain - before, alone - before) == (POOL, 1)


@needs_libgomp
def test_other_threads_keep_their_pools() -> None:
    in_thread(single_threaded, fill)
    assert torch.get_num_threads() == POOL
    assert in_thread(torch.get_num_threads) == POOL


@pytest.mark.parametrize("layout", ["another folder", "no OpenMP"])
def test_where_there_is_no_openmp_nothing_is_done(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "__init__.py" if layout == "another folder" else Path(torch.__file__)
    monkeypatch.setattr(torch, "__file__", str(where))
    if layout == "no OpenMP":
        monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    caches = threads._omp_set_num_threads, threads.torch_library
    for each in caches:
        each.cache_clear()
    try:
        assert in_thread(single_threaded, lambda: torch.ones(2).sum().item()) == 2
        assert threads._omp_set_num_threads() is None
    finally:
        for each in caches:
            each.cache_clear()


class Listener:
    saves = 0

    def saved(self, step: int, path: str, num_bytes: int, seconds: float, blocked_s: float) -> None:
        self.saves += 1

    def not_saved(self, step: int, reason: str) -> None:
        raise AssertionError(reason)


@needs_libgomp
def test_the_thread_that_writes_checkpoints_starts_no_pool(tmp_path: Path) -> None:
    model = nn.Linear(1000, LARGE // 1000)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), step=1)

    def save() -> int:
        fill()  # the pool of training
        before, listener = num_threads(), Listener()
        saving = Saving(tmp_path, SavePolicy(), listener=listener, warn=print)
        saving.due(state)  # makes the buffers, in the thread
        saving(state)
        end_s = time.monotonic() + 60
        while not listener.saves and time.monotonic() < end_s:
            saving.due(state)
        added = num_threads() - before
        saving.close()
        assert listener.saves == 1
        return added

    assert in_thread(save) == 1


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the system does not tell")
def test_what_other_programs_take_is_not_counted() -> None:
    busy = [sys.executable, "-S", "-c", "while True: pass"]
    others = [subprocess.Popen(busy) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        time.sleep(0.2)
        begins = time.perf_counter(), time.thread_time(), undisturbed_s()
        while time.thread_time() - begins[1] < 0.1:
            pass
        ends = time.perf_counter(), time.thread_time(), undisturbed_s()
    finally:
        for other in others:
            other.kill()
            other.wait()
    elapsed_s, computed_s, counted_s = (end - begin for begin, end in zip(begins, ends, strict=True))
    assert elapsed_s > 1.5 * computed_s, "the machine was not busy"
    assert 0.99 * computed_s <= counted_s < computed_s + 0.2 * (elapsed_s - computed_s)


def test_sleep_is_counted() -> None:
    outer_s = time.perf_counter()
    begin_s = undisturbed_s()
    time.sleep(0.05)
    counted_s = undisturbed_s() - begin_s
    assert 0.045 < counted_s <= time.perf_counter() - outer_s
