"""Instruments: each module measures one thing and reports one dataclass of ``doctor/facts``. Only these import torch.

Listeners hear a loop while it runs and cost next to nothing. Replays run a recorded step again.
"""

from __future__ import annotations

from collections.abc import Callable

from trainwright.doctor.measure import formats, nonfinite
from trainwright.doctor.measure.batch_digits import BatchDigits
from trainwright.doctor.measure.growth import Growth
from trainwright.doctor.measure.held import Memory
from trainwright.doctor.measure.loading import ResumeProbe
from trainwright.doctor.measure.mixed_precision import MixedPrecision
from trainwright.doctor.measure.nonfinite import NonfiniteListener
from trainwright.doctor.measure.ranks.probe import make_ranks_probe
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.replay.experiments import Experiment

LISTENERS: tuple[Callable[[WatchedObjects], Probe | None], ...] = (
    Memory,
    NonfiniteListener,
)
"""Each makes a listener for a loop, or None where it has nothing to hear there."""
OF_LIVE_LOOPS: tuple[Callable[[WatchedObjects], Probe | None], ...] = (
    BatchDigits,
    Growth,
    MixedPrecision,
    ResumeProbe,
    make_ranks_probe,
)
"""Those that can tell nothing from steps of our own engine that are run again."""
REPLAYS: tuple[Experiment, ...] = (
    formats.formats,
    formats.loss_in_fp32,
    nonfinite.trace,
)
"""In any order: the cheap and the telling ones run first."""
