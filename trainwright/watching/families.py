"""What the families of the doctor measure in a live loop."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.doctor.ranks import measure as ranks
from trainwright.recorder.probes import LoopObjects, Probe, WatchedObjects
from trainwright.state.snapshot import LiveObjects

MEASURES: tuple[Callable[[WatchedObjects], list[Probe]], ...] = (ranks.probes,)
"""Of each family in the order of ``doctor.FAMILIES``: makes the probes that it needs in this loop."""


def probes_of_families(subject: LiveObjects, loop: LoopObjects) -> list[Probe]:
    """Returns new probes of every family."""
    watched = WatchedObjects(subject=subject, **vars(loop))
    return [probe for make in MEASURES for probe in make(watched)]
