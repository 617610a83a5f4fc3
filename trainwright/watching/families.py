"""What the families of the doctor measure. Their experiments and trials are registered when this is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trainwright.doctor.measure import LISTENERS, OF_LIVE_LOOPS, REPLAYS
from trainwright.doctor.remedies import TRIALS
from trainwright.recorder.probes import LoopObjects, Probe, WatchedObjects
from trainwright.replay import trials
from trainwright.replay.experiments import EXPERIMENTS
from trainwright.state.snapshot import LiveObjects

EXPERIMENTS.update({each.name: each for each in REPLAYS})
trials.TRIALS.update(TRIALS)


class Measures(NamedTuple):
    """What a family listens with. ``probes`` makes the listeners that it needs in this loop.

    ``needs_live_loop``: it can tell nothing from steps of our own engine that are run again.
    """

    probes: Callable[[WatchedObjects], list[Probe]]
    needs_live_loop: bool


MEASURES: tuple[Measures, ...] = ()
"""In the order of ``doctor.FAMILIES``, for those that listen."""


def probes_of_families(subject: LiveObjects, loop: LoopObjects, *, live: bool) -> list[Probe]:
    """Returns new probes of every family. ``live``: they hear a loop, and not steps of our engine that run again."""
    watched = WatchedObjects(subject=subject, **vars(loop))
    makers = (*LISTENERS, *(OF_LIVE_LOOPS if live else ()))
    converted = [made for make in makers if (made := make(watched)) is not None]
    return converted + [
        probe for each in MEASURES if live or not each.needs_live_loop for probe in each.probes(watched)
    ]
