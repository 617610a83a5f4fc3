"""What the families of the doctor measure. Their experiments and trials are registered when this is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from trainwright.doctor.averages import measure as averages
from trainwright.doctor.data import measure as data
from trainwright.doctor.data import remedy as _try_data  # noqa: F401  registers its trials
from trainwright.doctor.function import measure as function
from trainwright.doctor.function import remedy as _try_function  # noqa: F401  registers its trials
from trainwright.doctor.gradient import measure as _gradient  # noqa: F401  registers its experiments
from trainwright.doctor.loss import measure as loss
from trainwright.doctor.loss import remedy as _try_loss  # noqa: F401  registers its trials
from trainwright.doctor.measure import LISTENERS, OF_LIVE_LOOPS, REPLAYS
from trainwright.doctor.program import measure as program
from trainwright.doctor.program import remedy as _try_program  # noqa: F401  registers its trials
from trainwright.doctor.remedies import TRIALS
from trainwright.doctor.update import measure as update
from trainwright.doctor.update import remedy as _try_update  # noqa: F401  registers its trials
from trainwright.doctor.vitals import measure as vitals
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


MEASURES: tuple[Measures, ...] = (
    Measures(averages.probes, needs_live_loop=True),
    Measures(data.probes, needs_live_loop=True),
    Measures(function.probes, needs_live_loop=False),
    Measures(loss.probes, needs_live_loop=False),
    Measures(program.probes, needs_live_loop=True),
    Measures(update.probes, needs_live_loop=True),
    Measures(vitals.probes, needs_live_loop=False),
    Measures(vitals.probes_of_loop, needs_live_loop=True),
)
"""In the order of ``doctor.FAMILIES``, for those that listen."""


def probes_of_families(subject: LiveObjects, loop: LoopObjects, *, live: bool) -> list[Probe]:
    """Returns new probes of every family. ``live``: they hear a loop, and not steps of our engine that run again."""
    watched = WatchedObjects(subject=subject, **vars(loop))
    makers = (*LISTENERS, *(OF_LIVE_LOOPS if live else ()))
    converted = [made for make in makers if (made := make(watched)) is not None]
    return converted + [
        probe for each in MEASURES if live or not each.needs_live_loop for probe in each.probes(watched)
    ]
