"""Measurements of the number formats in a step."""

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
    """Angles of positions: ``far`` positions are above 256; ``same`` of them have their neighbour's angles."""

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
    # Fraction of sampled 16-bit weights with a gradient that an update left unchanged; the median of ``updates``
    # updates
    still: float = 0.0
    updates: int = 0  # Updates at the highest learning rate so far
    is_constant_rate: bool = False  # All sampled updates so far had one learning rate
    kept_elsewhere: bool = False  # The optimizer keeps float32 copies of the weights or uses stochastic rounding
    # First step that computed with weights that autocast had cached before the last update
    stale_since: int | None = None
    zeros: float = 0.0  # Fraction of gradients that are 0, for a loss in float16 without a loss scale
    # Root mean square of these gradients in units of 6e-8, the smallest float16; median of several steps
    rms_in_steps: float = math.inf
    micro_batches: int = 0  # Number of micro-batches that are summed
    sum_error: float = 0.0  # Relative error of the 16-bit sum over micro-batches, compared with the float32 sum
    sum_rounding: float = 0.0  # Relative error of the float32 sum rounded once to 16 bits
