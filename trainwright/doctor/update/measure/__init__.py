"""What is measured of updates: on the replay of a step, and between the steps of a live loop."""

from __future__ import annotations

from trainwright.doctor.update.measure import replayed as _replayed  # noqa: F401  registers its experiment
from trainwright.doctor.update.measure.between import WritesProbe
from trainwright.recorder.probes import Probe, WatchedObjects


def probes(watched: WatchedObjects) -> list[Probe]:
    """The listener between the steps of a loop."""
    return [WritesProbe(watched)]
