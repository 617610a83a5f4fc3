"""Worker processes of torch's DataLoader, watched while the trainer waits: which one died or hangs, at what sample."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from types import TracebackType

import torch
from torch.utils.data import DataLoader

from trainwright.data.collation import Batch
from trainwright.data.fetch import Failed, Fetch, Fetched, FetchStream, Key
from trainwright.data.in_progress import InProgress
from trainwright.errors import DataError, text_of

POLL_S = 0.5
"""How often the trainer looks at the workers while it waits for them."""
WorkerInit = Callable[[int], object]
LEAVE_OUT = "open it with dataset[i] and repair it, or leave it out with data.quarantine: [i]"


@dataclass(frozen=True)
class Workers:
    """``count`` processes, each of which loads ``prefetch`` micro-batches ahead.

    The trainer waits for one at most ``timeout_s`` (None: for ever). ``init(worker)`` is called in each process when it
    starts; ``context`` is the start method of multiprocessing (None: that of Python).
    """

    count: int
    prefetch: int = 2
    timeout_s: float | None = None
    init: WorkerInit | None = None
    context: str | None = None
    pin_memory: bool = False


def read_in_workers(
    source: Fetch | FetchStream, keys: Iterator[Key] | None, how: Workers
) -> Iterator[Fetched | Failed]:
    """Yields what ``source`` gives for ``keys`` (None: a stream), in order.

    Raises DataError, which names the sample, when a worker dies or a micro-batch does not come in time.
    """
    source.in_progress = InProgress(how.count)
    requested: deque[Key] = deque()
    earlier = set(multiprocessing.active_children())
    with sigchld_as_it_was():
        fetched = _started(source, None if keys is None else _noted(keys, requested), how)
    watch = _Watch(
        [each for each in multiprocessing.active_children() if each not in earlier], source.in_progress, requested
    )
    try:
        while (batch := _next(fetched, watch, how.timeout_s)) is not None:
            if requested:
                requested.popleft()
            yield batch
    except GeneratorExit:
        raise
    except BaseException:
        for worker in watch.workers:  # it may be stuck: torch would wait seconds for each to end by itself
            worker.terminate()
        raise


def _started(source: Fetch | FetchStream, keys: Iterator[Key] | None, how: Workers) -> Iterator[Fetched | Failed]:
    with warnings.catch_warnings():  # more workers than cores is the user's choice
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader: DataLoader[Fetched | Failed] = DataLoader(
            source,
            batch_size=None,
            sampler=None if keys is None else _OneIterator(keys),
            num_workers=how.count,
            prefetch_factor=how.prefetch,
            pin_memory=how.pin_memory,
            collate_fn=_as_is,
            timeout=POLL_S,
            worker_init_fn=partial(_begin, os.getpid(), how, source.in_progress),
            multiprocessing_context=how.context,
            generator=torch.Generator(),  # its own, so that ours does not move
        )
        return iter(loader)


class _OneIterator:
    """A sampler that returns the same endless iterator."""

    def __init__(self, keys: Iterator[Key]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Key]:
        return self.keys


def _noted(keys: Iterator[Key], requested: deque[Key]) -> Iterator[Key]:
    for key in keys:
        requested.append(key)
        yield key


def _as_is(batch: Batch) -> Batch:
    return batch


@contextmanager
def sigchld_as_it_was() -> Iterator[None]:
    """Keeps torch from handling SIGCHLD: its handler raises wherever the trainer is, in the midst of a step.

    A worker that has died is noticed where the trainer waits for it: the state is whole there.
    """
    if threading.current_thread() is not threading.main_thread():  # torch sets none there
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    yield
    is_torchs = getattr(before, "__module__", "") == "torch.utils.data._utils.signal_handling"  # of a loader before
    if before is not None:  # else it is none of Python's, and cannot be put back
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_torchs else before)


# while the trainer waits


@dataclass(frozen=True)
class _Watch:
    """The worker processes, what each is reading, and the keys that were handed out and have not come back."""

    workers: list[BaseProcess]
    in_progress: InProgress
    requested: Sequence[Key]

    def dead(self, *, wait: bool) -> BaseProcess | None:
        """A worker that has ended. ``wait``: a socket broke, so one is about to have."""
        until_s = time.monotonic() + (2 * POLL_S if wait else 0.0)
        while True:
            if ended := next((each for each in self.workers if not each.is_alive()), None):
                return ended
            if time.monotonic() >= until_s:
                return None
            time.sleep(0.01)

    def samples(self, worker: BaseProcess) -> list[int]:
        """The samples that a worker is reading."""
        first, count = self.in_progress.of(worker.pid)
        of_key = next(
            (key.ids.tolist() for key in self.requested if count and len(key.ids) == count and key.ids[0] == first),
            None,
        )
        return of_key or list(range(first, first + count))  # one alone, or those of a stream

    def hanging(self) -> list[int]:
        """The samples that keep the trainer waiting."""
        reading = [each for each in map(self.samples, self.workers) if each]
        awaited = set(self.requested[0].ids.tolist()) if self.requested else set(reading[0] if reading else ())
        return next((each for each in reading if not awaited.isdisjoint(each)), sorted(awaited))


def _next(fetched: Iterator[Fetched | Failed], watch: _Watch, timeout_s: float | None) -> Fetched | Failed | None:
    begin_s = time.monotonic()
    while True:
        try:
            return next(fetched, None)
        except Exception as error:  # of torch's machinery: what a dataset raises comes back as a value
            if dead := watch.dead(wait=isinstance(error, OSError | EOFError)):
                raise _died(dead, watch) from None
            if not str(error).startswith("DataLoader timed out"):
                raise DataError(
                    f"worker processes cannot be used: {text_of(error)}", remedy="data.workers: 0"
                ) from error
        if timeout_s is not None and time.monotonic() - begin_s >= timeout_s:
            ids = watch.hanging()
            raise DataError(
                f"no data came for {timeout_s:g} s: a worker is still reading {_named(ids)}",
                sample_ids=ids,
                remedy=f"{LEAVE_OUT}; where reading may take so long, set data.timeout to more",
            )


def _died(worker: BaseProcess, watch: _Watch) -> DataError:
    code, ids = worker.exitcode or 0, watch.samples(worker)
    if code == -signal.SIGTERM:
        time.sleep(
            2 * POLL_S
        )  # who ends a whole job sends it to the trainer too, which stops for that and not for this
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    remedy = {
        -signal.SIGKILL: "most often memory ran out (see dmesg): take fewer data.workers or a smaller data.prefetch",
        -signal.SIGBUS: "most often shared memory is full: enlarge /dev/shm (docker run --shm-size=8g)",
    }.get(code, LEAVE_OUT if ids else "try data.workers: 0, where the error is seen")
    what = "was killed" if code < 0 else "ended"
    return DataError(
        f"a process that loads data {what} {how} while it read {_named(ids)}", sample_ids=ids, remedy=remedy
    )


def _named(ids: Sequence[int]) -> str:
    if not ids:
        return "no sample"
    return f"sample {ids[0]}" if len(ids) == 1 else f"the samples {list(ids)}"


# in a worker


def _begin(trainer: int, how: Workers, in_progress: InProgress, worker: int) -> None:
    """Gives a worker a process group of its own: Ctrl-C reaches the foreground group, and the run decides when to stop.

    Ends a worker whose trainer was killed before torch's watchdog began; it would never end. (Under a fork server its
    parent is another process anyway.)
    """
    if os.getppid() != trainer and (how.context or multiprocessing.get_start_method()) != "forkserver":
        os._exit(1)
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    sys.excepthook = partial(_report, trainer, sys.excepthook)
    in_progress.start()
    if how.init is not None:
        how.init(worker)


def _report(
    trainer: int,
    report: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Says nothing of a socket that broke because the trainer was killed: a thread hands memory over there."""
    until_s = time.monotonic() + POLL_S
    while isinstance(error, ConnectionError | EOFError) and time.monotonic() < until_s:
        if os.getppid() != trainer:
            return
        time.sleep(0.01)  # the sockets of a killed process are closed before its children are orphans
    report(kind, error, trace)
