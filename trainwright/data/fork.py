"""Reads samples in a forked process with a time limit, so that a crash or hang does not affect the run."""

from __future__ import annotations

import io
import mmap
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.data import TensorDataset

from trainwright.data.fetch import AnyDataset, Sample
from trainwright.data.unwrap import length_of
from trainwright.errors import DataError, TrainwrightError, text_of

T = TypeVar("T")
Begin = Callable[[int], None]
"""Called with the position of each sample before it is read."""
SELF_EXIT_DELAY_S = 60.0
"""A forked process that was not terminated exits by itself this long after its time limit, in seconds."""
FIRST_SAMPLES_LIMIT_S = 2.0
"""Time limit of ``first_samples`` for the forked process. Samples that it cannot read in time are not read."""
_NO_POSITION = -1
_OPEN_ONE_REMEDY = "open one by hand with dataset[0]"


class TooSlowError(Exception):
    """The time limit is over, and a forked process is still reading sample ``position`` (-1: none)."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


CAN_FORK = sys.platform == "linux"
"""macOS ends a forked process that uses its frameworks, and Windows cannot fork."""


def read_in_fork(read: Callable[[Begin], Iterator[T]], *, limit_s: float) -> Iterator[T]:
    """Yield the items of ``read(begin)``, which runs in a forked process and pickles them.

    The fork costs a few milliseconds. It has one thread, and cannot use a GPU that this process uses. On macOS and
    Windows, and in a daemonic process of multiprocessing, which may start no other, ``read`` runs in this process, and
    the limit is checked between two items.

    Raises:
        DataError: The process ended early; names the sample.
        TooSlowError: It did not finish within ``limit_s``.
    """
    if not CAN_FORK or multiprocessing.current_process().daemon:
        yield from _read_here(read, limit_s)
        return
    place = mmap.mmap(-1, struct.calcsize("q"))  # the position of the sample
    _write_position(place, _NO_POSITION)
    here, there = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run_reader, args=(read, place, there, limit_s))
    try:
        with warnings.catch_warnings():  # Python 3.12 warns; other threads do not exist in the new process
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        end_s = time.monotonic() + limit_s
        while here.poll(max(0.0, end_s - time.monotonic())):
            try:
                kind, value = pickle.loads(here.recv_bytes())
            except EOFError:
                process.join()
                raise _death_error(process.exitcode or 0, _read_position(place)) from None
            if kind == "done":
                return
            if kind == "raised":
                raise DataError(f"the samples cannot be read: {value}", remedy=_OPEN_ONE_REMEDY)
            yield value
        raise TooSlowError(_read_position(place))
    finally:
        here.close()
        there.close()
        if process.pid is not None:
            process.kill()
            process.join()
            process.close()


def _read_here(read: Callable[[Begin], Iterator[T]], limit_s: float) -> Iterator[T]:
    position, end_s = _NO_POSITION, time.monotonic() + limit_s

    def begin(number: int) -> None:
        nonlocal position
        position = number
        if time.monotonic() > end_s:
            raise TooSlowError(position)

    try:
        yield from read(begin)
    except (DataError, TooSlowError):
        raise
    except Exception as error:
        raise DataError(f"the samples cannot be read: {text_of(error, lines=1)}", remedy=_OPEN_ONE_REMEDY) from None


def try_in_fork(dataset: Any, positions: Iterable[int], *, limit_s: float) -> int:
    """Read these samples in a forked process, and return how many it had read within ``limit_s``.

    Errors are ignored, because the caller reads the samples again. Raises DataError if one of them terminates that
    process.
    """

    def read(begin: Begin) -> Iterator[None]:
        for position in positions:
            begin(position)
            with suppress(Exception, SystemExit):
                dataset[position]
            yield

    done = 0
    with suppress(TooSlowError):
        for _ in read_in_fork(read, limit_s=limit_s):
            done += 1
    return done


def first_samples(dataset: AnyDataset, most: int, left_out: Collection[int] = ()) -> Iterator[Sample]:
    """Yield at most ``most`` readable samples, none of them in ``left_out``; fewer if they are slow to read.

    Raises DataError if one terminates the process that tries it.
    """
    positions = list(islice((i for i in range(length_of(dataset) or 0) if i not in left_out), most))
    if not isinstance(dataset, TensorDataset):
        tried = try_in_fork(dataset, positions, limit_s=FIRST_SAMPLES_LIMIT_S)
        positions = positions[: max(1, tried)]
    for position in positions:
        try:
            sample = dataset[position]
        except TrainwrightError:
            raise
        except (Exception, SystemExit):
            # training raises this error with the sample's id, unless the sample is in the checkpoint's quarantine
            continue
        yield sample


def is_of_cuda(error: BaseException) -> bool:
    """Return True if the error may come from a forked process that cannot use the GPU of its parent."""
    return isinstance(error, RuntimeError) and "CUDA" in text_of(error)


def _run_reader(read: Callable[[Begin], Iterator[T]], place: mmap.mmap, pipe: Connection, limit_s: float) -> NoReturn:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s + SELF_EXIT_DELAY_S)
        torch.set_num_threads(1)
        try:
            for value in read(lambda position: _write_position(place, position)):
                pipe.send_bytes(_pickled(("value", value)))
            pipe.send_bytes(_pickled(("done", None)))
        except Exception as error:
            pipe.send_bytes(_pickled(("raised", text_of(error, lines=1))))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, because torch takes 50 times as long, and writes the full storage of a view."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        try:
            return torch.from_numpy, (value.numpy(),)
        except (TypeError, RuntimeError):  # on another device, of a dtype that NumPy lacks, or with a gradient
            return NotImplemented


def _pickled(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _write_position(place: mmap.mmap, position: int) -> None:
    place[:8] = struct.pack("q", position)


def _read_position(place: mmap.mmap) -> int:
    position: int = struct.unpack("q", place[:8])[0]
    return position


def _death_error(code: int, position: int) -> DataError:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if position == _NO_POSITION:
        return DataError(f"a process that reads the data {how}", remedy=_OPEN_ONE_REMEDY)
    return DataError(
        f"a process that reads the data {how} while it read sample {position}",
        sample_ids=(position,),
        remedy=f"open it with dataset[{position}] and repair it, or leave it out with data.quarantine: [{position}]",
    )
