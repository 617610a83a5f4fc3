"""Reads samples in a forked process, within a time: one that ends its process or hangs does not take the run along."""

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
"""Is told the position of each sample before it is read."""
SPARE_S = 60.0
"""A forked process that nobody ends does so by itself this long after its time was over."""
BEGINNING_S = 2.0
"""A forked process has said its id by then."""
_NONE = -1
_OPEN_ONE = "open one by hand with dataset[0]"


class Indexed(Protocol):
    def __getitem__(self, position: int, /) -> object: ...


class TooSlowError(Exception):
    """The time is over, and a forked process is still reading sample ``position`` (-1: none)."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def read_in_fork(read: Callable[[Begin], Iterator[T]], *, limit_s: float) -> Iterator[T]:
    """Yields what ``read(begin)`` yields in a forked process, pickled.

    Raises DataError, which names the sample, when that process ends before it is done, and TooSlowError when it is not
    done within ``limit_s``. Costs a few milliseconds; it has
    one thread, and cannot use a GPU that this process uses.
    """
    place = mmap.mmap(-1, struct.calcsize("qq"))  # the position of the sample, and the id of the process
    _note(place, _NONE)
    here, there = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = _forked(place)
    if not pid:
        place[8:] = struct.pack("q", os.getpid())
        os.close(here)
        _be_the_reader(read, place, there, limit_s)
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
                    raise _died(status, _noted(place)) from None
                if kind == "done":
                    return
                if kind == "raised":
                    raise DataError(f"the samples cannot be read: {value}", remedy=_OPEN_ONE)
                yield value
            raise TooSlowError(_noted(place))
    finally:
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _forked(place: mmap.mmap) -> int:
    """As ``os.fork``. Where the handler of a signal raises before the id is known, the new process is ended."""
    parent = os.getpid()
    try:
        with warnings.catch_warnings():  # of Python 3.12: other threads do not exist in the new process
            warnings.simplefilter("ignore", DeprecationWarning)
            return os.fork()
    except BaseException as error:
        if os.getpid() == parent and not isinstance(error, OSError):
            end_s = time.monotonic() + BEGINNING_S
            while not (pid := struct.unpack("q", place[8:])[0]) and time.monotonic() < end_s:
                time.sleep(0.01)
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        raise


def try_in_fork(dataset: Indexed, positions: Iterable[int], *, limit_s: float) -> int:
    """Reads these samples in a forked process, and returns how many it had read within ``limit_s``.

    What they raise is left to who reads them here. Raises DataError when one of them ends that process.
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
    """Whether it may have been raised because a forked process cannot use the GPU of its parent."""
    return isinstance(error, RuntimeError) and "CUDA" in text_of(error)


def _be_the_reader(read: Callable[[Begin], Iterator[T]], place: mmap.mmap, fd: int, limit_s: float) -> NoReturn:
    """In the forked process, which never returns from here."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s + SPARE_S)
        torch.set_num_threads(1)
        pipe = Connection(fd, readable=False)
        try:
            for value in read(lambda position: _note(place, position)):
                pipe.send_bytes(_pickled(("value", value)))
            pipe.send_bytes(_pickled(("done", None)))
        except Exception as error:
            pipe.send_bytes(_pickled(("raised", text_of(error, lines=1))))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays: torch takes 50 times as long for each, and writes the whole storage of a view."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        try:
            return torch.from_numpy, (value.numpy(),)
        except (TypeError, RuntimeError):  # on another device, of a dtype that NumPy lacks, with a gradient
            return NotImplemented


def _pickled(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _note(place: mmap.mmap, position: int) -> None:
    place[:8] = struct.pack("q", position)


def _noted(place: mmap.mmap) -> int:
    position: int = struct.unpack("q", place[:8])[0]
    return position


def _died(status: int, position: int) -> DataError:
    code = os.waitstatus_to_exitcode(status)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if position == _NONE:
        return DataError(f"a process that looks at the data {how}", remedy=_OPEN_ONE)
    return DataError(
        f"a process that looks at the data {how} while it read sample {position}",
        sample_ids=(position,),
        remedy=f"open it with dataset[{position}] and repair it, or leave it out with data.quarantine: [{position}]",
    )
