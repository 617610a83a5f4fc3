"""Instruments: each function or probe makes one measurement, and reports it as a dataclass of ``doctor/facts``.

Listeners observe a running loop at little cost. Replays run a recorded step again.
"""

from __future__ import annotations

from collections.abc import Callable

from trainwright.doctor.measure import batches, nonfinite, tokens
from trainwright.doctor.measure.accumulation import accumulation
from trainwright.doctor.measure.averages import Averages
from trainwright.doctor.measure.calls import Calls, Scaler
from trainwright.doctor.measure.compilations import Compilations
from trainwright.doctor.measure.evaluations import Evaluations
from trainwright.doctor.measure.function import function, padded
from trainwright.doctor.measure.inputs import inputs
from trainwright.doctor.measure.layers import LayerMeasurement, dropout_gap
from trainwright.doctor.measure.loaders import Loaders
from trainwright.doctor.measure.loading import KeptStates, Moments, PretrainedProbe, ResumeProbe
from trainwright.doctor.measure.loss_calls import loss_calls, loss_terms
from trainwright.doctor.measure.memory import Growth, Memory
from trainwright.doctor.measure.mixed_precision import MixedPrecision, formats, loss_in_fp32
from trainwright.doctor.measure.modes import Modes, in_eval_mode
from trainwright.doctor.measure.modules import Modules
from trainwright.doctor.measure.nonfinite import NonfiniteListener
from trainwright.doctor.measure.ranks.probe import make_ranks_probe
from trainwright.doctor.measure.rows import InputRows
from trainwright.doctor.measure.samples import StoredSamples
from trainwright.doctor.measure.schedule import Schedules
from trainwright.doctor.measure.splits import Splits
from trainwright.doctor.measure.steadiness import Steadiness
from trainwright.doctor.measure.tokens import Targets
from trainwright.doctor.measure.updates import again, batch_steps, update
from trainwright.doctor.measure.weights import MovingWeights
from trainwright.doctor.measure.wiring import activation_between, first_loss_rescaled, integrity, structure, symmetry
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.replay.experiments import Experiment

LISTENERS: tuple[Callable[[WatchedObjects], Probe | None], ...] = (
    Memory,
    NonfiniteListener,
    Calls,
    LayerMeasurement,
    Modes,
    Modules,
    MovingWeights,
    Targets,
    Schedules,
    PretrainedProbe,
    Compilations,
)
"""Each creates a listener for a loop; None if there is nothing to observe."""
LIVE_LOOP_LISTENERS: tuple[Callable[[WatchedObjects], Probe | None], ...] = (
    Growth,
    MixedPrecision,
    ResumeProbe,
    make_ranks_probe,
    Averages,
    Evaluations,
    KeptStates,
    Loaders,
    InputRows,
    Moments,
    StoredSamples,
    Scaler,
    Splits,
    Steadiness,
)
"""Listeners that observe the user's loop only. Replayed steps of the engine show them nothing."""
REPLAYS: tuple[Experiment, ...] = (
    formats,
    loss_in_fp32,
    nonfinite.trace,
    accumulation,
    activation_between,
    again,
    batch_steps,
    dropout_gap,
    first_loss_rescaled,
    function,
    padded,
    in_eval_mode,
    inputs,
    integrity,
    loss_calls,
    loss_terms,
    structure,
    symmetry,
    batches.batch,
    batches.label_signal,
    batches.padding_in_loss,
    batches.standardized_inputs,
    tokens.tokens,
    update,
)
"""The order here does not matter: cheap and informative replays run first."""
