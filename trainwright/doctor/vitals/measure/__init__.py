"""What is measured of the vital signs: weights at each look, the loop at each step, and a few replays."""

from __future__ import annotations

from trainwright.doctor.vitals.measure import higher_rates as higher_rates
from trainwright.doctor.vitals.measure import reach as reach
from trainwright.doctor.vitals.measure import replays as replays
from trainwright.doctor.vitals.measure.steadiness import Steadiness
from trainwright.doctor.vitals.measure.weights import MovingWeights
from trainwright.recorder.probes import Probe, WatchedObjects


def probes(watched: WatchedObjects) -> list[Probe]:
    """Needs no live loop."""
    return [MovingWeights(watched)]


def probes_of_loop(watched: WatchedObjects) -> list[Probe]:
    """What happens between steps that follow each other."""
    return [Steadiness()]
