"""Instruments: each module measures one thing and reports one dataclass of ``doctor/facts``. Only these import torch.

Listeners hear a loop while it runs and cost next to nothing. Replays run a recorded step again.
"""

from __future__ import annotations

from collections.abc import Callable

from trainwright.doctor.measure.accumulation import accumulation
from trainwright.doctor.measure.calls import Calls, Scaler
from trainwright.doctor.measure.custom_functions import check_functions
from trainwright.doctor.measure.derivative import derivative
from trainwright.doctor.measure.kept import Kept
from trainwright.doctor.measure.modes import Modes, in_eval_mode
from trainwright.doctor.measure.names import Names
from trainwright.doctor.measure.schedule import Schedule
from trainwright.doctor.measure.updates import again, batch_steps, update
from trainwright.doctor.measure.writes import Moments, Writes
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.replay.experiments import Experiment

LISTENERS: tuple[Callable[[WatchedObjects], Probe | None], ...] = (
    Calls,
    Modes,
    Schedule,
)
"""Each makes a listener for a loop, or None where it has nothing to hear there."""
OF_LIVE_LOOPS: tuple[Callable[[WatchedObjects], Probe | None], ...] = (
    Kept,
    Moments,
    Names,
    Scaler,
    Writes,
)
"""Those that can tell nothing from steps of our own engine that are run again."""
REPLAYS: tuple[Experiment, ...] = (
    accumulation,
    again,
    batch_steps,
    check_functions,
    derivative,
    in_eval_mode,
    update,
)
"""In any order: the cheap and the telling ones run first."""
