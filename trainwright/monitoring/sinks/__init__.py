"""Trackers beside the run folder. Optional, and never a reason for a training to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

from trainwright.errors import TrainwrightError

MOST_WAITING = 10_000
CLOSING_S = 30.0
"""How long the end of a run waits for its sinks, all together."""


class Sink(Protocol):
    """Gets what log.jsonl gets."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self, exit_code: int) -> None:
        """Flushes what has not been written. ``exit_code`` is the run's."""


class OpenableSink(Sink, Protocol):
    """A sink that is opened before it is used."""

    def open(self) -> None:
        """Does what may wait: opens files, asks servers."""


class SinkFactory(Protocol):
    """Makes a sink. ``config`` is the recipe as plain values, ``from_step`` the step that the run resumes from.

    Packages are imported here, in the thread that trains: a worker that is forked while another thread imports may find
    half a module.
    """

    def __call__(self, folder: Path, config: Mapping[str, object], *, from_step: int) -> OpenableSink: ...


class QueuedSink:
    """A sink that is opened and called by a thread of its own, so that one that hangs or fails holds up nobody.

    At its first exception it warns with the reason and is not called again. Where it falls more than ``MOST_WAITING``
    calls behind, later ones are left out.
    """

    def __init__(self, name: str, sink: OpenableSink, warn: Callable[[str], None]) -> None:
        self._name, self._sink, self._warn = name, sink, warn
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._left_out, self._exit_code = 0, 0
        self._is_done = Event()
        Thread(target=self._run, name=f"trainwright-{name}", daemon=True).start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        kept = dict(values)
        self._put(lambda: self._sink.scalars(step, kept))

    def text(self, step: int, name: str, text: str) -> None:
        self._put(lambda: self._sink.text(step, name, text))

    def close(self, exit_code: int) -> None:
        """Waits until all is written, or ``CLOSING_S``."""
        close_sinks([self], exit_code)

    def begin_close(self, exit_code: int) -> None:
        """After what is waiting, the sink is closed."""
        self._exit_code = exit_code
        self._calls.put(None)

    def wait(self, limit_s: float) -> None:
        """For the end of ``begin_close``; says so where that does not come in time."""
        if not self._is_done.wait(max(0.0, limit_s)):
            self._warn(f"{self._name} did not take the end of this run in time, log.jsonl has it all")
        elif self._left_out:
            self._warn(f"{self._name} lacks {self._left_out} records that came too fast for it, log.jsonl has them")

    def _put(self, call: Callable[[], None]) -> None:
        if self._is_done.is_set():
            return
        if self._calls.qsize() >= MOST_WAITING:
            self._left_out += 1
        else:
            self._calls.put(call)

    def _run(self) -> None:
        try:
            self._sink.open()
            while (call := self._calls.get()) is not None:
                call()
            self._sink.close(self._exit_code)
        except Exception as error:  # another project's code: anything may come out of it
            self._warn(_gone(self._name, error))
        finally:
            self._is_done.set()


def open_sinks(
    factories: Mapping[str, SinkFactory],
    folder: Path,
    config: Mapping[str, object],
    warn: Callable[[str], None],
    *,
    from_step: int = 0,
) -> list[QueuedSink]:
    """Opens a sink from each factory, by name. One that cannot be made or opened (no login, say) is warned about.

    Raises MissingExtra for a package that is not installed.
    """
    sinks = []
    for name, factory in factories.items():
        try:
            sinks.append(QueuedSink(name, factory(folder, config, from_step=from_step), warn))
        except TrainwrightError:
            raise
        except Exception as error:  # a package that is broken
            warn(_gone(name, error))
    return sinks


def close_sinks(sinks: Sequence[QueuedSink], exit_code: int) -> None:
    """Closes all of them at once, and waits for at most ``CLOSING_S``."""
    for sink in sinks:
        sink.begin_close(exit_code)
    end_s = time.monotonic() + CLOSING_S
    for sink in sinks:
        sink.wait(end_s - time.monotonic())


def _gone(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or "no reason given"
    return f"{name} gets nothing more of this run, log.jsonl has it all: {type(error).__name__}: {reason}"
