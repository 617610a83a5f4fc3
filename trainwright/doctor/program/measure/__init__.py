"""Measures which objects of a loop belong together, what it keeps, sets and is warned of, and which rates it uses."""

from __future__ import annotations

from trainwright.doctor.program.measure import modes as _modes  # noqa: F401  registers what it measures
from trainwright.doctor.program.measure import modes_heard as _modes_heard  # noqa: F401  registers what it measures
from trainwright.doctor.program.measure import schedules as _schedules  # noqa: F401  registers what it measures
from trainwright.doctor.program.measure.constants import ConstantsProbe
from trainwright.doctor.program.measure.names import NamesProbe
from trainwright.doctor.program.measure.objects import ObjectsProbe
from trainwright.doctor.program.measure.rates import RatesProbe
from trainwright.doctor.program.measure.states import KeptProbe, WarningsProbe
from trainwright.recorder.probes import Probe, WatchedObjects


def probes(watched: WatchedObjects) -> list[Probe]:
    """The listeners of the family."""
    return [
        ObjectsProbe(watched),
        KeptProbe(watched),
        NamesProbe(watched),
        ConstantsProbe(watched),
        WarningsProbe(),
        RatesProbe(),
    ]
