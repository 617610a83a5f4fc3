"""What only the living loop can show: each probe listens all the time at next to no cost and tells at checkups."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.recorder.hooks import Listener
from trainwright.recorder.numbers import Numbers
from trainwright.recorder.program import RecordedStep
from trainwright.state.snapshot import LiveObjects


@dataclass(frozen=True, kw_only=True)
class LoopObjects:
    """What of a loop was handed over, and how many micro-batches make a step (None: not declared)."""

    loaders: tuple[object, ...] = ()
    scalers: tuple[object, ...] = ()
    schedulers: tuple[object, ...] = ()
    accumulation: int | None = None


@dataclass(frozen=True, kw_only=True)
class WatchedObjects(LoopObjects):
    """The same with the live models and optimizers."""

    subject: LiveObjects


class Probe(Listener):
    """A listener that can say what it has seen. ``name`` is the experiment of its Examined records."""

    name = ""
    urgent = False
    """Set by a probe that has heard what should not wait for the next checkup. Unset when it is asked."""

    def on_closed(self, segment: RecordedStep) -> None:
        """A step is over; on a GPU its numbers may not be there yet."""

    def on_read(self, segment: RecordedStep, numbers: Numbers) -> None:
        """The numbers of a step are known: at once, or of a GPU some steps later."""

    def values(self) -> dict[str, Any] | None:
        """What is known by now, as JSON values; None when there is nothing new to say."""
        return None


PROBES: list[Callable[[WatchedObjects], Probe]] = []


def probe(make: Callable[[WatchedObjects], Probe]) -> Callable[[WatchedObjects], Probe]:
    """Registers a class or function that makes a Probe for what is watched."""
    PROBES.append(make)
    return make


def load_all() -> None:
    """Imports every file of probes once."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def make_probes(subject: LiveObjects, loop: LoopObjects) -> list[Probe]:
    """One of each."""
    load_all()
    watched = WatchedObjects(subject=subject, **vars(loop))
    return [make(watched) for make in PROBES]
