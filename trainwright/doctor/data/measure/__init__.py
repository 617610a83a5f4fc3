"""What is measured of the data: rows by their content, draws of the loaders, and the scale of each feature."""

from __future__ import annotations

from trainwright.doctor.data.measure import features as features
from trainwright.doctor.data.measure import inputs as _inputs  # noqa: F401  registers what it measures
from trainwright.doctor.data.measure import labels as _labels  # noqa: F401  registers what it measures
from trainwright.doctor.data.measure import loaders as _loaders  # noqa: F401  registers what it measures
from trainwright.doctor.data.measure.draws import Draws
from trainwright.doctor.data.measure.evaluations import EvaluationsProbe
from trainwright.doctor.data.measure.rows import InputRows
from trainwright.recorder.probes import Probe, WatchedObjects


def probes(watched: WatchedObjects) -> list[Probe]:
    """All need a live loop."""
    return [InputRows(watched), Draws(watched), EvaluationsProbe(watched)]
