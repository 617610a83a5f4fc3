"""Optional trackers in addition to the run folder. Their errors never stop the training."""

from __future__ import annotations

import importlib.util
import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

from trainwright.errors import MissingExtra, TrainwrightError
from trainwright.recipe import SINKS
from trainwright.runs.media import Histogram, Image

MAX_QUEUED_CALLS = 10_000
CLOSING_S = 30.0
"""Maximum seconds that the end of a run waits for all its sinks together."""


class Sink(Protocol):
    """Receives the values of log.jsonl."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def media(self, step: int, name: str, value: Image | Histogram) -> None: ...


class OpenableSink(Sink, Protocol):
    """A sink that is opened before its first use."""

    def open(self) -> None:
        """Do slow work, such as opening files and contacting servers."""

    def close(self, exit_code: int) -> None:
        """Flush pending values. ``exit_code`` is 1 if the run failed, else 0."""


class BaseSink:
    """Keeps the arguments of a SinkFactory. A sink that has no place for texts, images and histograms ignores them."""

    def __init__(self, folder: Path, config: Mapping[str, object], *, from_step: int = 0) -> None:
        self._folder = folder
        self._config = config
        self._from_step = from_step

    def text(self, step: int, name: str, text: str) -> None: ...

    def media(self, step: int, name: str, value: Image | Histogram) -> None: ...


class SinkFactory(Protocol):
    """Makes a sink. ``config`` is the recipe as plain values, ``from_step`` the step that the run resumes from.

    Packages are imported here, in the training thread: a worker that is forked while another thread imports may see a
    partially imported module.
    """

    def __call__(self, folder: Path, config: Mapping[str, object], *, from_step: int) -> OpenableSink: ...


class QueuedSink:
    """Opens and calls a sink in a separate thread, so that a hanging or failing sink does not block the training.

    At the first exception it warns with the reason and does not call the sink again. Beyond ``MAX_QUEUED_CALLS``
    pending calls, later ones are dropped.
    """

    def __init__(self, name: str, sink: OpenableSink, warn: Callable[[str], None]) -> None:
        self._name = name
        self._sink = sink
        self._warn = warn
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._left_out, self._exit_code = 0, 0
        self._is_done = Event()
        Thread(target=self._run, name=f"trainwright-{name}", daemon=True).start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        kept = dict(values)
        self._put(lambda: self._sink.scalars(step, kept))

    def text(self, step: int, name: str, text: str) -> None:
        self._put(lambda: self._sink.text(step, name, text))

    def media(self, step: int, name: str, value: Image | Histogram) -> None:
        self._put(lambda: self._sink.media(step, name, value))

    def begin_close(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._calls.put(None)

    def wait(self, limit_s: float) -> None:
        """Wait for the end of ``begin_close``, with a warning if it takes longer than ``limit_s``."""
        if not self._is_done.wait(max(0.0, limit_s)):
            self._warn(f"{self._name} did not finish in time at the end of this run; log.jsonl is complete")
        elif self._left_out:
            self._warn(f"{self._name} lacks {self._left_out} records that arrived too fast; log.jsonl has them")

    def _put(self, call: Callable[[], None]) -> None:
        if self._is_done.is_set():
            return
        if self._calls.qsize() >= MAX_QUEUED_CALLS:
            self._left_out += 1
        else:
            self._calls.put(call)

    def _run(self) -> None:
        try:
            self._sink.open()
            while (call := self._calls.get()) is not None:
                call()
            self._sink.close(self._exit_code)
        except Exception as error:  # code of another project may raise any exception
            self._warn(_failure_message(self._name, error))
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
    """Open a sink from each factory, by name. Warns of a sink that cannot be made or opened (for example, no login).

    Raises MissingExtra for a package that is not installed.
    """
    sinks = []
    for name, factory in factories.items():
        try:
            sinks.append(QueuedSink(name, factory(folder, config, from_step=from_step), warn))
        except TrainwrightError:
            raise
        except Exception as error:  # a broken package
            warn(_failure_message(name, error))
    return sinks


def close_sinks(sinks: Sequence[QueuedSink], exit_code: int) -> None:
    """Close all sinks concurrently, and wait for at most ``CLOSING_S``."""
    for sink in sinks:
        sink.begin_close(exit_code)
    end_s = time.monotonic() + CLOSING_S
    for sink in sinks:
        sink.wait(end_s - time.monotonic())


def _failure_message(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or "no reason given"
    return f"{name} receives no more of this run, log.jsonl is complete: {type(error).__name__}: {reason}"


def sink_factories(names: Sequence[str]) -> dict[str, SinkFactory]:
    """Return the factories of these sinks by name. Raises MissingExtra if a package is not installed."""
    rows = [SINKS[name] for name in dict.fromkeys(names)]
    for row in rows:
        if row.package and importlib.util.find_spec(row.package) is None:
            raise MissingExtra(row.package, needed_for=f"the sink {row.name!r}")
    return {row.name: pkgutil.resolve_name(row.factory) for row in rows}
