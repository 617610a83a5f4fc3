"""Worker processes that die, hang or lose their trainer: the sample is named, and no step is interrupted."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from trainwright.checkpoint.cursor import StepBatch
from trainwright.data.fetch import InProgress
from trainwright.data.loading import Loading, StepBatches
from trainwright.errors import DataError

pytestmark = [pytest.mark.process]

SIZE, BATCH = 32, 4


def kill(with_signal: signal.Signals) -> None:
    os.kill(os.getpid(), with_signal)


class Items(Dataset[Tensor]):
    """Something befalls the worker that reads sample 11; ``reads`` counts what workers have read."""

    def __init__(self, befalls: Callable[[], object] = lambda: None) -> None:
        self.befalls = befalls
        self.reads = multiprocessing.get_context("fork").Value("i", 0)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        if index == 11 and get_worker_info():
            self.befalls()
        with self.reads:
            self.reads.value += 1
        return torch.tensor(index)


class Batched(Items):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Tensor]):
    def __init__(self, befalls: Callable[[], object]) -> None:
        self.items = Items(befalls)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.items[index] for index in range(SIZE))


def read(dataset: Any, steps: int = 99, **options: Any) -> list[StepBatch]:
    loading = Loading(BATCH, BATCH, shuffle=False, epochs=1, **{"workers": 2, **options})
    return list(islice(StepBatches(dataset, loading), steps))


DEATHS = {
    "exit": (partial(os._exit, 3), "ended with exit code 3", "data.quarantine"),
    "segfault": (partial(kill, signal.SIGSEGV), "was killed by SIGSEGV", "data.quarantine"),
    "out of memory": (partial(kill, signal.SIGKILL), "was killed by SIGKILL", "memory ran out"),
    "shared memory": (partial(kill, signal.SIGBUS), "was killed by SIGBUS", "/dev/shm"),
}


@pytest.mark.parametrize("how", list(DEATHS))
def test_a_sample_that_kills_its_worker_is_named(how: str) -> None:
    befalls, said, remedy = DEATHS[how]
    with pytest.raises(DataError) as caught:
        read(Items(befalls))
    assert caught.value.message == f"a process that loads data {said} while it read sample 11"
    assert caught.value.sample_ids == (11,) and remedy in caught.value.remedy


@pytest.mark.parametrize("make", [Batched, Stream])
def test_of_a_batch_that_is_read_at_once_all_are_named(make: Callable[[Callable[[], object]], Any]) -> None:
    with pytest.raises(DataError, match="exit code 3") as caught:
        read(make(partial(os._exit, 3)))
    assert caught.value.sample_ids == ((8, 9, 10, 11) if make is Batched else (11,))


AHEAD = 5 * BATCH
"""Samples that two workers have read: one step that is taken, and two steps ahead for each worker."""


def wait_until(is_so: Callable[[], bool], patience_s: float = 60) -> None:
    end_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def workers() -> list[int]:
    return [each.pid for each in multiprocessing.active_children() if each.pid]


@pytest.mark.parametrize("loader_before", [False, True], ids=["alone", "after a loader of torch"])
def test_a_worker_that_is_killed_in_the_midst_of_a_step_does_not_interrupt_it(loader_before: bool) -> None:
    """torch's handler of SIGCHLD would raise wherever the trainer is."""
    if loader_before:
        list(DataLoader(Items(), num_workers=1))
    items = Items()
    batches = iter(StepBatches(items, Loading(BATCH, BATCH, workers=2)))
    next(batches)
    wait_until(lambda: items.reads.value == AHEAD)
    time.sleep(0.2)  # the last one is handed over
    os.kill(workers()[0], signal.SIGKILL)
    end_s = time.monotonic() + 0.5
    while time.monotonic() < end_s:  # the step
        time.sleep(0.01)
    with pytest.raises(DataError, match="was killed by SIGKILL while it read no sample"):
        list(islice(batches, 9))
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.parametrize("make", [Items, Batched, Stream])
def test_a_sample_that_hangs_is_named_when_the_time_is_over(make: Callable[[Callable[[], object]], Any]) -> None:
    items = make(partial(time.sleep, 300))
    for timeout_s in (1, 10):  # a busy machine may take longer than a second until the workers have come so far
        with pytest.raises(DataError, match=rf"no data came for {timeout_s} s: ") as caught:
            read(items, timeout_s=float(timeout_s))
        wait_until(lambda: workers() == [])
        if 11 in caught.value.sample_ids:
            break
    assert re.search("reading .*11", caught.value.message)
    assert caught.value.sample_ids == ((8, 9, 10, 11) if make is Batched else (11,))
    assert "data.timeout" in caught.value.remedy


def test_a_slow_sample_is_waited_for() -> None:
    assert len(read(Items(partial(time.sleep, 1.2)), timeout_s=30.0)) == SIZE // BATCH


def note_worker(folder: Path, worker: int) -> None:
    (folder / str(worker)).touch()


def test_an_init_function_of_ones_own_is_called_in_each_worker(tmp_path: Path) -> None:
    read(Items(), worker_init=partial(note_worker, tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]

    def failing(worker: int) -> None:
        raise OSError("no such mount")

    with pytest.raises(DataError, match="no such mount"):
        read(Items(), worker_init=failing)


def test_in_the_trainer_nothing_is_noted() -> None:
    in_progress = InProgress(2)
    in_progress.begin(7)
    assert in_progress.of(os.getpid()) == (-1, 0)


# The trainer is killed while a worker hands memory over: it has connected to the socket and says nothing more.
HANDED_OVER = """
import os, signal, socket, sys
from multiprocessing import resource_sharer
import torch
from trainwright.data.loading import Loading, StepBatches

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() and not os.path.exists(sys.argv[1]):
            resource_sharer._resource_sharer.register(print, print)
            open(sys.argv[1], "w").write(resource_sharer._resource_sharer._address)
        return torch.tensor(index)

batches = iter(StepBatches(Items(), Loading(1, 1, workers=1)))
next(batches)
one = socket.socket(socket.AF_UNIX)
one.connect(open(sys.argv[1]).read())
{then}
"""
KILLED = "import time; time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
ALIVE = "import time; time.sleep(0.5); one.close(); time.sleep(1.5)"


@pytest.mark.slow
@pytest.mark.parametrize(("then", "said"), [(KILLED, False), (ALIVE, True)], ids=["killed", "alive"])
def test_a_worker_whose_trainer_is_killed_prints_nothing(then: str, said: bool, tmp_path: Path) -> None:
    script = HANDED_OVER.replace("{then}", then)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "address")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert bool(re.search("ConnectionResetError|EOFError", done.stderr)) is said, done.stderr
    assert said or done.stderr == ""


def with_lock() -> Items:
    items = Items()
    items.reads = multiprocessing.get_context("spawn").Value("i", 0)  # can be passed to a process that starts
    items.befalls = partial(str, [{"lock": threading.Lock()}])
    return items


@pytest.mark.parametrize(
    ("dataset", "options", "name"),
    [
        (with_lock(), {}, "dataset.befalls cannot be pickled"),
        (Stream(lambda: None), {}, "dataset.items.befalls cannot be pickled"),
        ([1] * SIZE, {"collate": lambda samples: samples}, "collate_fn cannot be pickled"),
        ([{"a": [print, lambda: None]}] * SIZE, {}, r"dataset\[0\].a\[1\] cannot be pickled"),
    ],
    ids=["lock", "function", "collate_fn", "item"],
)
def test_what_spawned_workers_cannot_get_is_named(dataset: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(DataError, match=f"^{name}, as the start method 'spawn'") as raised:
        read(dataset, start_method="spawn", **options)
    assert "top level of a module" in raised.value.remedy


def test_workers_end_at_once_if_their_batches_are_collected_in_a_cycle() -> None:
    """As those of a job, to which observers refer. torch waits 5 s for each worker that does not end by itself."""
    steps = iter(StepBatches(Items(), Loading(BATCH, BATCH, shuffle=False, workers=2)))
    next(steps)
    cycle: list[object] = [steps]
    cycle.append(cycle)
    del steps, cycle
    begin_s = time.monotonic()
    gc.collect()
    assert time.monotonic() - begin_s < 4
