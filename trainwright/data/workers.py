"""Worker processes of torch's DataLoader, watched while the trainer waits, to find which one died or hangs, and its
sample.
"""

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
from itertools import starmap
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from types import SimpleNamespace, TracebackType

import torch
from torch.utils.data import DataLoader

from trainwright.data.fetch import (
    LEAVE_OUT_REMEDY,
    Batch,
    Failed,
    Fetch,
    Fetched,
    FetchStream,
    InProgress,
    Key,
    Loading,
    WorkerInit,
)
from trainwright.errors import DataError, text_of

POLL_S = 0.5
"""Seconds between two checks of the workers while the trainer waits."""


def read_in_workers(
    source: Fetch | FetchStream, keys: Iterator[Key] | None, loading: Loading
) -> Iterator[Fetched | Failed]:
    """Yield the items of ``source`` for ``keys`` (None: a stream), in order.

    Raises DataError, which names the sample, if a worker dies or a micro-batch does not arrive in time.
    """
    source.in_progress = InProgress(loading.workers)
    requested: deque[Key] = deque()
    earlier = set(multiprocessing.active_children())
    with preserved_sigchld():
        fetched = _started(source, None if keys is None else _recorded(keys, requested), loading)
    watch = _Watch(
        [each for each in multiprocessing.active_children() if each not in earlier], source.in_progress, requested
    )
    _READING.append(fetched)
    try:
        while (batch := _next(fetched, watch, loading.timeout_s)) is not None:
            if requested:
                requested.popleft()
            yield batch
    except GeneratorExit:
        raise
    except BaseException:
        for worker in watch.workers:  # it may be stuck, and torch would wait seconds for each to exit by itself
            worker.terminate()
        raise
    finally:
        _READING[:] = [each for each in _READING if each is not fetched]


_READING: list[Iterator[Fetched | Failed]] = []
"""Iterators of torch in use.

If the garbage collector found one in a cycle with its queues, it would close the queues first. The iterator could then
not tell its workers to end, and would wait 5 s for each.
"""


def _started(source: Fetch | FetchStream, keys: Iterator[Key] | None, loading: Loading) -> Iterator[Fetched | Failed]:
    start_method = loading.start_method or multiprocessing.get_start_method()
    with warnings.catch_warnings():  # more workers than cores is the user's choice
        warnings.filterwarnings("ignore", message="This DataLoader will create|Got pickle error")
        loader: DataLoader[Fetched | Failed] = DataLoader(
            source,
            batch_size=None,
            sampler=keys,
            num_workers=loading.workers,
            prefetch_factor=loading.prefetch,
            pin_memory=loading.pin_memory,
            collate_fn=_identity,
            timeout=POLL_S,
            worker_init_fn=partial(_begin, os.getpid(), start_method, loading.worker_init, source.in_progress),
            multiprocessing_context=loading.start_method,
            generator=torch.Generator(),  # a separate one, so that the default generator does not change
        )
        try:
            return iter(loader)
        except (PicklingError, AttributeError, TypeError) as error:
            parts = {
                "dataset": source.dataset,
                "collate_fn": loading.collate,
                "worker_init_fn": loading.worker_init,
            }
            at_fault = next(filter(None, starmap(_unpicklable, parts.items())), "")
            if not at_fault:
                raise
            raise DataError(
                f"{at_fault} cannot be pickled, as the start method {start_method!r} of workers requires: "
                f"{text_of(error, lines=1)}",
                remedy="define functions at the top level of a module, and open files and locks at the first use in a "
                'worker; or multiprocessing_context="fork" for the DataLoader; or num_workers=0',
            ) from error


MAX_PICKLED_DEPTH = 6


def _unpicklable(name: str, value: object, depth: int = 0) -> str:
    """Return the path of the innermost attribute or item that cannot be pickled; "" if ``value`` can be."""
    try:
        ForkingPickler(SimpleNamespace(write=len)).dump(value)
        return ""
    except RuntimeError:  # may be passed to a process that starts, and not otherwise, such as a lock of multiprocessing
        found = ""
    except Exception:
        found = name
    items = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    parts: dict[str, object] = {f"{name}.{key}": part for key, part in items.items()}
    if isinstance(value, tuple | list):
        parts = {f"{name}[{index}]": part for index, part in enumerate(value)}
    if depth == MAX_PICKLED_DEPTH:
        return found
    return next((inner for path, part in parts.items() if (inner := _unpicklable(path, part, depth + 1))), found)


def _recorded(keys: Iterator[Key], requested: deque[Key]) -> Iterator[Key]:
    for key in keys:
        requested.append(key)
        yield key


def _identity(batch: Batch) -> Batch:
    return batch


@contextmanager
def preserved_sigchld() -> Iterator[None]:
    """Keep torch from handling SIGCHLD, because its handler raises anywhere in the trainer, even within a step.

    A dead worker is detected while the trainer waits for it, when the state is complete.
    """
    # torch sets no handler in another thread, nor on Windows
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    yield
    # the handler of an earlier loader
    is_torchs = getattr(before, "__module__", "") == "torch.utils.data._utils.signal_handling"
    if before is not None:  # else it is not a Python handler, and cannot be restored
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if is_torchs else before)


# functions used while the trainer waits


@dataclass(frozen=True)
class _Watch:
    """The worker processes, the samples each is reading, and the keys of pending requests."""

    workers: list[BaseProcess]
    in_progress: InProgress
    requested: Sequence[Key]

    def dead(self, *, wait: bool) -> BaseProcess | None:
        """Return a worker that has ended, or None. ``wait``: wait for one up to 1 s, because its socket is broken."""
        until_s = time.monotonic() + (2 * POLL_S if wait else 0.0)
        while True:
            if ended := next((each for each in self.workers if not each.is_alive()), None):
                return ended
            if time.monotonic() >= until_s:
                return None
            time.sleep(0.01)

    def samples(self, worker: BaseProcess) -> list[int]:
        """Return the samples that a worker is reading."""
        first, count = self.in_progress.of(worker.pid)
        of_key = next(
            (key.ids.tolist() for key in self.requested if count and len(key.ids) == count and key.ids[0] == first),
            None,
        )
        return of_key or list(range(first, first + count))  # a single sample of a key, or the samples of a stream

    def hanging(self) -> list[int]:
        """Return the samples that the trainer is waiting for."""
        reading = [each for each in map(self.samples, self.workers) if each]
        awaited = set(self.requested[0].ids.tolist()) if self.requested else set(reading[0] if reading else ())
        return next((each for each in reading if not awaited.isdisjoint(each)), sorted(awaited))


def _next(fetched: Iterator[Fetched | Failed], watch: _Watch, timeout_s: float | None) -> Fetched | Failed | None:
    begin_s = time.monotonic()
    while True:
        try:
            return next(fetched, None)
        except Exception as error:  # an error of torch's machinery: errors of a dataset are returned as values
            if dead := watch.dead(wait=isinstance(error, OSError | EOFError)):
                raise _death_error(dead, watch) from None
            if not str(error).startswith("DataLoader timed out"):
                raise DataError(
                    f"worker processes cannot be used: {text_of(error)}", remedy="data.workers: 0"
                ) from error
        if timeout_s is not None and time.monotonic() - begin_s >= timeout_s:
            ids = watch.hanging()
            raise DataError(
                f"no data came for {timeout_s:g} s: a worker is still reading {_named(ids)}",
                sample_ids=ids,
                remedy=f"{LEAVE_OUT_REMEDY}; where reading may take so long, set data.timeout to more",
            )


def _death_error(worker: BaseProcess, watch: _Watch) -> DataError:
    code, ids = worker.exitcode or 0, watch.samples(worker)
    name = signal.Signals(-code).name if code < 0 else ""
    if name == "SIGTERM":  # if the job is terminated, the trainer gets the signal too and should stop for that reason
        time.sleep(2 * POLL_S)
    how = f"by {name}" if name else f"with exit code {code}"
    remedy = {
        "SIGKILL": "most often memory ran out (see dmesg): take fewer data.workers or a smaller data.prefetch",
        "SIGBUS": "most often shared memory is full: enlarge /dev/shm (docker run --shm-size=8g)",
    }.get(name, LEAVE_OUT_REMEDY if ids else "try data.workers: 0, where the error is seen")
    what = "was killed" if code < 0 else "ended"
    return DataError(
        f"a process that loads data {what} {how} while it read {_named(ids)}", sample_ids=ids, remedy=remedy
    )


def _named(ids: Sequence[int]) -> str:
    if not ids:
        return "no sample"
    return f"sample {ids[0]}" if len(ids) == 1 else f"the samples {list(ids)}"


# functions used in a worker


def _begin(
    trainer: int, start_method: str, worker_init: WorkerInit | None, in_progress: InProgress, worker: int
) -> None:
    """Put a worker into its own process group, so that Ctrl-C does not reach it, because the run decides when to stop.

    Ends a worker whose trainer was killed before torch's watchdog started, because it would never end. (Not checked
    with a fork server, which is the parent of all workers.)
    """
    if os.getppid() != trainer and start_method != "forkserver":
        os._exit(1)
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    sys.excepthook = partial(_report, trainer, sys.excepthook)
    in_progress.start()
    if worker_init is not None:
        worker_init(worker)


def _report(
    trainer: int,
    report: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Report an error, unless the trainer was killed, which breaks the socket that passes shared memory to it."""
    until_s = time.monotonic() + POLL_S
    while isinstance(error, ConnectionError | EOFError) and time.monotonic() < until_s:
        if os.getppid() != trainer:
            return
        time.sleep(0.01)  # the sockets of a killed process are closed before its children become orphans
    report(kind, error, trace)
