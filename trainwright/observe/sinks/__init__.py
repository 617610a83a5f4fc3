"""Trackers beside the run folder. Optional, and never a reason for a training to stop."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainwright.errors import MissingExtra, TrainwrightError, UsageError


class Sink(Protocol):
    """Where numbers go beside log.jsonl."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self, exit_code: int) -> None:
        """Flush what is still on its way. ``exit_code`` is the run's."""


class Guarded:
    """A sink that may fail: at the first exception it warns with the reason and is silent from then on."""

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


def require_sinks(names: Sequence[str]) -> None:
    """Raises MissingExtra for a tracker whose package is not installed: better now than after the first steps."""
    for name in names:
        if name in ("tensorboard", "wandb") and importlib.util.find_spec(name) is None:
            raise MissingExtra(name, extra=name, needed_for=f"the sink {name!r}")


def open_sinks(
    names: Sequence[str],
    folder: Path,
    config: Mapping[str, Any],
    warn: Callable[[str], None],
    *,
    from_step: int = 0,
) -> list[Sink]:
    """Open the named sinks, each guarded.

    ``folder`` is the run folder, ``config`` the recipe as plain values, ``from_step`` the step that the run
    resumes from. Raises UsageError for an unknown name, MissingExtra for a package that is not installed. A sink
    that cannot open for another reason (no network, no login) is warned about and left out.
    """
    openers = {"tensorboard": _tensorboard, "wandb": _wandb}
    for name in names:
        if name not in openers:
            close = difflib.get_close_matches(name, openers, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose from: {', '.join(openers)}"
            raise UsageError(f"there is no sink {name!r}", remedy=hint)
    sinks: list[Sink] = []
    for name in dict.fromkeys(names):
        try:
            sinks.append(Guarded(name, openers[name](folder, config, from_step), warn))
        except TrainwrightError:
            raise
        except Exception as error:  # see Guarded
            warn(_gone(name, error))
    return sinks


def _gone(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split()) or "no reason given"
    return f"{name} gets nothing more of this run, log.jsonl has it all: {type(error).__name__}: {reason}"


def _tensorboard(folder: Path, config: Mapping[str, Any], from_step: int) -> Sink:
    from trainwright.observe.sinks.tensorboard import TensorBoard

    return TensorBoard(folder, config, from_step=from_step)


def _wandb(folder: Path, config: Mapping[str, Any], from_step: int) -> Sink:
    from trainwright.observe.sinks.wandb import WeightsAndBiases

    return WeightsAndBiases(folder, config)
