"""Trackers beside the run folder. Optional, and never a reason for a training to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from trainwright.errors import TrainwrightError


class Sink(Protocol):
    """A tracker that gets what log.jsonl gets."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self, exit_code: int) -> None:
        """Flushes what has not been written. ``exit_code`` is the run's."""


class SinkFactory(Protocol):
    """Opens a sink. ``config`` is the recipe as plain values, ``from_step`` the step that the run resumes from."""

    def __call__(self, folder: Path, config: Mapping[str, object], *, from_step: int) -> Sink: ...


class Guarded:
    """A sink that may fail: at the first exception it warns with the reason and is not called again."""

    def __init__(self, name: str, sink: Sink, warn: Callable[[str], None]) -> None:
        self._name, self._sink, self._warn = name, sink, warn
        self._works = True

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda: self._sink.scalars(step, values))

    def text(self, step: int, name: str, text: str) -> None:
        self._try(lambda: self._sink.text(step, name, text))

    def close(self, exit_code: int) -> None:
        self._try(lambda: self._sink.close(exit_code))
        self._works = False

    def _try(self, act: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            act()
        except Exception as error:  # another project's code: anything may come out of it
            self._works = False
            self._warn(_gone(self._name, error))


def open_sinks(
    factories: Mapping[str, SinkFactory],
    folder: Path,
    config: Mapping[str, object],
    warn: Callable[[str], None],
    *,
    from_step: int = 0,
) -> list[Sink]:
    """Opens a sink from each factory, by name, and guards it.

    Raises MissingExtra for a package that is not installed. A sink that cannot open for another reason (no network,
    no login) is warned about and left out.
    """
    sinks: list[Sink] = []
    for name, factory in factories.items():
        try:
            sinks.append(Guarded(name, factory(folder, config, from_step=from_step), warn))
        except TrainwrightError:
            raise
        except Exception as error:  # see Guarded
            warn(_gone(name, error))
    return sinks


def _gone(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or "no reason given"
    return f"{name} gets nothing more of this run, log.jsonl has it all: {type(error).__name__}: {reason}"
