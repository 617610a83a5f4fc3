"""Instruments: each module measures one thing and reports one dataclass of ``doctor/facts``. Only these import torch.

Listeners hear a loop while it runs and cost next to nothing. Replays run a recorded step again.
"""

from __future__ import annotations

from collections.abc import Callable

from trainwright.doctor.measure import batches, tokens
from trainwright.doctor.measure.evaluations import Evaluations
from trainwright.doctor.measure.loaders import Loaders
from trainwright.doctor.measure.rows import Rows
from trainwright.doctor.measure.targets import Targets
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.replay.experiments import Experiment

LISTENERS: tuple[Callable[[WatchedObjects], Probe | None], ...] = (Targets,)
"""Each makes a listener for a loop, or None where it has nothing to hear there."""
OF_LIVE_LOOPS: tuple[Callable[[WatchedObjects], Probe | None], ...] = (
    Evaluations,
    Loaders,
    Rows,
)
"""Those that can tell nothing from steps of our own engine that are run again."""
REPLAYS: tuple[Experiment, ...] = (
    batches.batch,
    batches.label_signal,
    batches.padding_in_loss,
    batches.standardized_inputs,
    tokens.sample_labels,
    tokens.tokens,
)
"""In any order: the cheap and the telling ones run first."""
