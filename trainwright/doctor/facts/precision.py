"""Measurements of the number formats in a step, and of values that are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Emptied:
    """An operation whose result is all 0 in float16, but up to ``largest`` in float32."""

    op: str
    module: str | None
    largest: float


@dataclass(frozen=True)
class Aliased:
    """Position angles: ``far`` counts positions from 256 on; ``same`` of them have their neighbour's angles."""

    module: str
    dtype: str
    far: int
    same: int


@dataclass(frozen=True, kw_only=True)
class FormatFacts:
    """16-bit formats in a forward pass and its loss."""

    experiment: ClassVar[str] = "formats"
    dtype: str = ""  # The 16-bit data type; "" without one
    loss_ops: tuple[str, ...] = ()  # Functions after the models that take tensors of this type
    emptied: tuple[Emptied, ...] = ()  # Operations that underflow to 0
    aliased: tuple[Aliased, ...] = ()  # Position angles that coincide


@dataclass(frozen=True, kw_only=True)
class LossInFp32Facts:
    """The loss of a step as computed, and with everything after the models in float32."""

    experiment: ClassVar[str] = "loss_in_fp32"
    loss: float  # The loss as computed
    loss_in_fp32: float  # The loss in float32
    error: float | None  # Relative difference of the gradients; None if unknown


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionFacts:
    """Observations of 16-bit weights, loss scales and autocast."""

    experiment: ClassVar[str] = "mixed_precision"
    still: float = 0.0  # Median fraction of 16-bit weights with a gradient that an update leaves unchanged
    updates: int = 0  # Sampled updates with at least half the highest learning rate so far
    is_constant_rate: bool = False  # All sampled updates so far had one learning rate
    kept_elsewhere: bool = False  # The optimizer keeps float32 copies of the weights or uses stochastic rounding
    never_moved: tuple[str, ...] = ()  # 16-bit tensors: at most 5 % of weights with a gradient changed
    stale_since: int | None = None  # First step that used weights that autocast had cached before the last update
    zeros: float = 0.0  # Fraction of gradients that are 0, for a loss in float16 without a loss scale
    rms_in_steps: float = math.inf  # Root mean square of the gradients in units of 6e-8, the smallest float16
    micro_batches: int = 0  # Number of micro-batches that are summed
    sum_error: float = 0.0  # Relative error of the 16-bit sum over micro-batches, compared with the float32 sum
    sum_rounding: float = 0.0  # Relative error of the float32 sum rounded once to 16 bits


@dataclass(frozen=True)
class ValueRange:
    """The range of the finite values of a tensor, and the numbers of NaN, infinite and zero values."""

    dtype: str
    shape: tuple[int, ...]
    min: float
    max: float
    nan: int
    inf: int
    zeros: int


@dataclass(frozen=True, kw_only=True)
class FirstNonfinite:
    """The first operation that made a step non-finite, or that read a non-finite value."""

    kind: str  # "op", or the value that was non-finite before: input, target, weight, buffer, gradient, constant, state
    what: str  # The mechanism (see ``replay/mechanism.py``)
    name: str | None  # Name of the non-finite value; None for an operation
    reached: str | None  # What the values reached: loss, gradient, weight, buffer, or end (the last result)
    op: str  # The function that the user called
    kernel: str  # The ATen operation
    phase: str  # forward, backward or update
    module: str | None  # Path of the module
    source: str | None  # Line in the user's source
    dtype: str  # Data type of the operation
    inputs: tuple[ValueRange, ...]  # Ranges of its inputs
    output: ValueRange  # Range of its output
    hidden_by: str | None = None  # The function that discarded the values in the forward pass
    micro_batch: int = 0  # Number of the micro-batch
    eps: float | None = None  # ``eps`` of the optimizer, for an operation of the update
    rows: tuple[int, ...] | None = None  # Samples that each make the step non-finite on their own; None: not measured
    ids: tuple[int, ...] = ()  # Ids of these samples, if known
    empty: float | None = None  # The constant that fills these samples and no others (padding); else None


@dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """The replay of a step that was not finite."""

    experiment: ClassVar[str] = "trace"
    micro_batches: int  # Number of micro-batches
    losses: tuple[float, ...] = ()  # Losses without the loss scale
    gradients: tuple[str, ...] = ()  # Names of the parameters whose gradient is not finite
    finite_without_scale: bool = False  # Only the loss scale makes the step overflow
    first: FirstNonfinite | None = None  # The first operation with a non-finite result
    fp32_finite: bool = False  # The full step is finite in float32


@dataclass(frozen=True, kw_only=True)
class BadInput:
    """An argument of a model with non-finite values, and the ids of the samples that contain them."""

    dtype: str
    nan: int
    inf: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SeenNonfinite:
    """Observations of a live step that was not finite."""

    experiment: ClassVar[str] = "nonfinite"
    bad: bool = False  # The step itself was not finite. False if only running statistics are not.
    inputs: tuple[BadInput, ...] = ()  # Arguments of the models with non-finite values
    gradients: tuple[str, ...] = ()  # Names of parameters whose gradient was not finite, before clipping
    num_gradients: int = 0  # Number of such parameters
    num_after_clip: int | None = None  # Number of such parameters after clipping; None without a clip
    dtype: str | None = None  # Data type of the gradients
    poisoned: tuple[str, ...] = ()  # Modules whose running statistics are not finite
