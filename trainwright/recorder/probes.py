"""Probes: listeners that measure what only the live loop shows. They cost next to nothing and report at checkups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from torch import nn

from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.recorder.comparisons import EvaluationSites
from trainwright.recorder.hooks import Listener
from trainwright.recorder.listener import call_each
from trainwright.recorder.numbers import Numbers
from trainwright.recorder.program import RecordedStep
from trainwright.runs.json_values import Facts
from trainwright.runs.records import Record


@dataclass(frozen=True, kw_only=True)
class LoopObjects:
    """The objects of a loop that the watch was called with, and the micro-batches of a step (None: not declared).

    ``patience_s``: a rank that makes no progress for so long is reported to the others. ``code`` returns the function
    that holds the loop, ``values`` the values of its variables, ``modules`` the modules among them. ``sites`` are the
    places that are known to evaluate. ``probes`` are further ones.
    """

    loaders: tuple[object, ...] = ()
    scalers: tuple[object, ...] = ()
    schedulers: tuple[object, ...] = ()
    accumulation: int | None = None
    patience_s: float = 60.0
    modules: Callable[[], Sequence[nn.Module]] = list
    values: Callable[[], Sequence[object]] = list
    code: Callable[[], CodeType | None] = lambda: None
    sites: EvaluationSites = field(default_factory=EvaluationSites)
    probes: tuple[Probe, ...] = ()


@dataclass(frozen=True)
class WatchSite:
    """The run folder of a watch (None: there is none), and how a probe writes and says something outside of a look.

    ``examines_all``: a probe may take as long as it needs.
    """

    folder: Path | None
    write: Callable[[Record], None]
    say: Callable[[str], None]
    examines_all: bool = False


@dataclass(frozen=True, kw_only=True)
class WatchedObjects(LoopObjects):
    """These, and the live models and optimizers."""

    subject: LiveObjects


class Probe(Listener):
    """A listener that reports facts. ``name`` is the experiment of its Examined records."""

    name = ""
    urgent = False
    """Set by a probe whose facts should not wait for the next checkup. Unset by ``values``."""

    def begin(self, site: WatchSite) -> None:
        """The watch begins."""

    def end(self, error: BaseException | None) -> None:
        """The loop is over, by ``error`` if there is one; the last look comes after this."""

    def on_closed(self, step: RecordedStep) -> None:
        """A step is over; on a GPU its numbers may not be there yet."""

    def on_read(self, step: RecordedStep, numbers: Numbers) -> None:
        """The numbers of a step are known: at once, or some steps later on a GPU."""

    def values(self) -> Facts | None:
        """The facts so far, as JSON values; None if there is nothing new."""
        return None


def begin_all(probes: Sequence[Probe], site: WatchSite) -> None:
    """Tells the probes that the watch begins; one that raises is stopped."""
    call_each([(each, each.begin) for each in probes], site)


def end_all(probes: Sequence[Probe], error: BaseException | None) -> None:
    """Tells the probes that the loop is over."""
    call_each([(each, each.end) for each in probes], error)
