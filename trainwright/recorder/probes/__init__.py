"""What only the living loop can show: each probe listens all the time at next to no cost and tells at checkups."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainwright.recorder.hooks import Listener
from trainwright.recorder.numbers import Numbers
from trainwright.recorder.program import Segment
from trainwright.recorder.ring import Subject


@dataclass(frozen=True)
class Watched:
    """What a watch was given."""

    subject: Subject
    loaders: tuple[Any, ...] = ()
    scalers: tuple[Any, ...] = ()
    schedulers: tuple[Any, ...] = ()
    accumulation: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Probe(Listener):
    """A listener that can say what it has seen. ``name`` is the experiment of its Examined records."""

    name = ""
    urgent = False
    """Set by a probe that has heard what should not wait for the next checkup. Unset when it is asked."""

    def on_closed(self, segment: Segment) -> None:
        """A step is over; on a GPU its numbers may not be there yet."""

    def on_read(self, segment: Segment, numbers: Numbers) -> None:
        """The numbers of a step are known: at once, or of a GPU some steps later."""

    def values(self) -> dict[str, Any] | None:
        """What is known by now, as JSON values; None when there is nothing new to say."""
        return None


PROBES: list[Callable[[Watched], Probe]] = []


def probe(make: Callable[[Watched], Probe]) -> Callable[[Watched], Probe]:
    """Registers a class or function that makes a Probe for what is watched."""
    PROBES.append(make)
    return make


def load_all() -> None:
    """Imports every file of probes once."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
