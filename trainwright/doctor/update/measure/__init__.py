"""What is measured of updates: on the replay of a step, and between the steps of a live loop."""

from __future__ import annotations

from trainwright.doctor.update.measure import again as _again  # noqa: F401  registers what it measures
from trainwright.doctor.update.measure import calls as _calls  # noqa: F401  registers what it measures
from trainwright.doctor.update.measure import rates as _rates  # noqa: F401  registers what it measures
from trainwright.doctor.update.measure import replayed as _replayed  # noqa: F401  registers its experiment
from trainwright.doctor.update.measure import restored as _restored  # noqa: F401  registers its experiment
from trainwright.doctor.update.measure import shrunk as _shrunk  # noqa: F401  registers its experiment
from trainwright.doctor.update.measure.between import WritesProbe
from trainwright.recorder.probes import Probe, WatchedObjects


def probes(watched: WatchedObjects) -> list[Probe]:
    """The listener between the steps of a loop."""
    return [WritesProbe(watched)]
