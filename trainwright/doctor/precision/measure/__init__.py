"""What is measured of precision: on the replay of a step, and of the batches of a live loop."""

from __future__ import annotations

from trainwright.doctor.precision.measure import casts as _casts  # noqa: F401  registers its experiment
from trainwright.doctor.precision.measure import float64 as _float64  # noqa: F401  registers its experiment
from trainwright.doctor.precision.measure import formats as _formats  # noqa: F401  registers what it measures
from trainwright.doctor.precision.measure import nonfinite as _nonfinite  # noqa: F401  registers what it measures
from trainwright.doctor.precision.measure import nonfinite_heard as _nonfinite_heard  # noqa: F401  registers what it measures
from trainwright.doctor.precision.measure.batches import BatchesProbe
from trainwright.recorder.probes import Probe, WatchedObjects


def probes(watched: WatchedObjects) -> list[Probe]:
    """The listener for batches."""
    return [BatchesProbe(watched)]
