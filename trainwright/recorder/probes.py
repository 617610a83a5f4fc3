"""Probes: cheap listeners that measure the live loop. Their facts are read at each examination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from torch import nn

from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.recorder.comparisons import EvaluationSites
from trainwright.recorder.hooks import Listener
from trainwright.recorder.numbers import Numbers
from trainwright.recorder.program import RecordedStep
from trainwright.runs.json_values import Facts, strict
from trainwright.runs.records import Record


@dataclass(frozen=True, kw_only=True)
class LoopObjects:
    """The objects of a loop that the watch was called with, and the number of micro-batches (None: not declared).

    A rank without progress for ``patience_s`` is reported to the others. ``frames`` returns the function that holds the
    loop and its callers, ``values`` the values of its variables, ``modules`` the modules among them. ``sites`` are the
    call sites that are known to evaluate. ``probes`` are additional probes.
    """

    loaders: tuple[object, ...] = ()
    schedulers: tuple[object, ...] = ()
    accumulation: int | None = None
    patience_s: float = 60.0
    modules: Callable[[], Sequence[nn.Module]] = list
    values: Callable[[], Sequence[object]] = list
    frames: Callable[[], Sequence[FrameType]] = list
    sites: EvaluationSites = field(default_factory=EvaluationSites)
    probes: tuple[Probe, ...] = ()


@dataclass(frozen=True)
class WatchSite:
    """The run folder of a watch (None: none), and functions with which a probe writes a record and prints a line."""

    folder: Path | None
    write: Callable[[Record], None]
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class WatchedObjects(LoopObjects):
    """The objects of ``LoopObjects``, and the live models and optimizers."""

    subject: LiveObjects


class Probe(Listener):
    """A listener that reports facts. ``name`` is the experiment of its Examined records."""

    name = ""
    observes_every_step = False
    """False: not called in most steady-state steps. True: called in all, but in deferred ones only ``on_closed``."""
    urgent = False
    """Set by a probe whose facts should not wait for the next examination. Unset by ``facts``."""
    only_changes = False
    """True: facts that equal the previous ones are not reported."""
    _last_facts: object = None

    def begin(self, site: WatchSite) -> None:
        """Called when the watch begins."""

    def end(self, error: BaseException | None) -> None:
        """Called when the loop is over, with its ``error`` if there is one. The last examination comes afterwards."""

    def on_closed(self, step: RecordedStep) -> None:
        """Called at the end of a step. On a GPU, its loss and norms may still be on their way to the host."""

    def on_read(self, step: RecordedStep, numbers: Numbers) -> None:
        """Called when the host has the loss and norms of a step: at once, or some steps later on a GPU."""

    def facts(self) -> object:
        """Returns the facts so far, a dataclass; None if there is nothing new."""
        return None

    def values(self) -> Facts | None:
        """Returns the facts as JSON values; None if there is nothing new."""
        facts = self.facts()
        if facts is None or (self.only_changes and facts == self._last_facts):
            return None
        self._last_facts = facts
        return dict(strict(vars(facts)))
