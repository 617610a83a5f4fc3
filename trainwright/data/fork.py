"""Reads samples in a forked process with a time limit, so that a crash or hang does not affect the run."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from trainwright.errors import DataError, text_of

T = TypeVar("T")
Begin = Callable[[int], None]
"""Called with the position of each sample before it is read."""
SELF_EXIT_DELAY_S = 60.0
"""A forked process that was not terminated exits by itself this long after its time limit, in seconds."""
START_TIMEOUT_S = 2.0
"""Maximum time until a forked process has stored its process id, in seconds."""
_NO_POSITION = -1
_OPEN_ONE_REMEDY = "open one by hand with dataset[0]"


class Indexed(Protocol):
    """A dataset that is read by position."""

    def __getitem__(self, position: int, /) -> object: ...


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
    Windows ``read`` runs in this process, and the limit is checked between two items.

    Raises:
        DataError: The process ended early; names the sample.
        TooSlowError: It did not finish within ``limit_s``.
    """
    if not CAN_FORK:
        yield from _read_here(read, limit_s)
        return
    place = mmap.mmap(-1, struct.calcsize("qq"))  # the position of the sample, and the id of the process
    _write_position(place, _NO_POSITION)
    here, there = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = _forked(place)
    if not pid:
        place[8:] = struct.pack("q", os.getpid())
        os.close(here)
        _run_reader(read, place, there, limit_s)
    status: int | None = None
    try:
        os.close(there)
        with Connection(here, writable=False) as pipe:
            end_s = time.monotonic() + limit_s
            while pipe.poll(max(0.0, end_s - time.monotonic())):
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    _, status = os.waitpid(pid, 0)
                    raise _death_error(status, _read_position(place)) from None
                if kind == "done":
                    return
                if kind == "raised":
                    raise DataError(f"the samples cannot be read: {value}", remedy=_OPEN_ONE_REMEDY)
                yield value
            raise TooSlowError(_read_position(place))
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


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


def _forked(place: mmap.mmap) -> int:
    """Call ``os.fork``. If a signal handler raises before the id is known, the new process is terminated."""
    parent = os.getpid()
    try:
        with warnings.catch_warnings():  # Python 3.12 warns; other threads do not exist in the new process
            warnings.simplefilter("ignore", DeprecationWarning)
            return os.fork()
    except BaseException as error:
        if os.getpid() == parent and not isinstance(error, OSError):
            end_s = time.monotonic() + START_TIMEOUT_S
            while not (pid := struct.unpack("q", place[8:])[0]) and time.monotonic() < end_s:
                time.sleep(0.01)
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        raise


def try_in_fork(dataset: Indexed, positions: Iterable[int], *, limit_s: float) -> int:
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


def is_of_cuda(error: BaseException) -> bool:
    """Return True if the error may come from a forked process that cannot use the GPU of its parent."""
    return isinstance(error, RuntimeError) and "CUDA" in text_of(error)


def _run_reader(read: Callable[[Begin], Iterator[T]], place: mmap.mmap, fd: int, limit_s: float) -> NoReturn:
    """Run in the forked process; never returns."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s + SELF_EXIT_DELAY_S)
        torch.set_num_threads(1)
        pipe = Connection(fd, readable=False)
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


def _death_error(status: int, position: int) -> DataError:
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if position == _NO_POSITION:
        return DataError(f"a process that reads the data {how}", remedy=_OPEN_ONE_REMEDY)
    return DataError(
        f"a process that reads the data {how} while it read sample {position}",
        sample_ids=(position,),
        remedy=f"open it with dataset[{position}] and repair it, or leave it out with data.quarantine: [{position}]",
    )
