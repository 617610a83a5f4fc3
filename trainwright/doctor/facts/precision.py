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
    """16-bit formats in a forward pass and its loss.

    Attributes:
        dtype: The 16-bit data type; "" without one.
        loss_ops: Functions after the models that take tensors of this type.
        emptied: Operations that underflow to 0.
        aliased: Position angles that coincide.
    """

    experiment: ClassVar[str] = "formats"
    dtype: str = ""
    loss_ops: tuple[str, ...] = ()
    emptied: tuple[Emptied, ...] = ()
    aliased: tuple[Aliased, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LossInFp32Facts:
    """The loss of a step as computed, and with everything after the models in float32.

    Attributes:
        loss: The loss as computed.
        loss_in_fp32: The loss in float32.
        error: Relative difference of the gradients; None if unknown.
    """

    experiment: ClassVar[str] = "loss_in_fp32"
    loss: float
    loss_in_fp32: float
    error: float | None


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionFacts:
    """Observations of 16-bit weights, loss scales and autocast.

    Attributes:
        still: Fraction of sampled 16-bit weights with a gradient that an update left unchanged; the median of
            ``updates`` updates.
        updates: Updates at the highest learning rate so far.
        kept_elsewhere: The optimizer keeps float32 copies of the weights or uses stochastic rounding.
        stale_since: First step that computed with weights that autocast had cached before the last update.
        zeros: Fraction of gradients that are 0, for a loss in float16 without a loss scale.
        rms_in_steps: Root mean square of these gradients in units of 6e-8, the smallest float16; median of several
            steps.
        micro_batches: Number of micro-batches that are summed.
        sum_error: Relative error of the 16-bit sum over micro-batches, compared with the float32 sum.
        sum_rounding: Relative error of the float32 sum rounded once to 16 bits.
    """

    experiment: ClassVar[str] = "mixed_precision"
    still: float = 0.0
    updates: int = 0
    kept_elsewhere: bool = False
    stale_since: int | None = None
    zeros: float = 0.0
    rms_in_steps: float = math.inf
    micro_batches: int = 0
    sum_error: float = 0.0
    sum_rounding: float = 0.0
