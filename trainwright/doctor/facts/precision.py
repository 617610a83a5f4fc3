"""What is measured of the number formats of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Emptied:
    """An operation in float16 that gives only 0 where float32 gives up to ``largest``."""

    op: str
    module: str | None
    largest: float


@dataclass(frozen=True)
class Aliased:
    """Angles of positions: ``far`` positions above 256, of which ``same`` have the angles of their neighbour."""

    module: str
    dtype: str
    far: int
    same: int


@dataclass(frozen=True, kw_only=True)
class FormatFacts:
    """The 16-bit dtypes in a forward pass and its loss: of ``values``, and of the ``weights`` that are trained.

    ``loss_ops`` are the functions after the models that take 16-bit numbers. ``scaled``: the loss is scaled.
    """

    experiment: ClassVar[str] = "formats"
    values: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    backwards: int = 1
    scaled: bool = False
    loss_ops: tuple[str, ...] = ()
    emptied: tuple[Emptied, ...] = ()
    aliased: tuple[Aliased, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LossInFp32Facts:
    """The loss of a step, and that with everything after the models in float32; ``error`` is that of the gradients."""

    experiment: ClassVar[str] = "loss_in_fp32"
    loss: float
    loss_in_fp32: float
    error: float | None


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionFacts:
    """What was seen live of 16-bit weights, loss scales and autocast.

    ``still`` is the fraction of sampled 16-bit weights with a gradient that an update left unchanged, the median of
    ``updates`` updates at the highest learning rate so far. ``kept_elsewhere``: the optimizer keeps float32 copies or
    rounds at random. ``still_scaled`` updates were made with gradients of a scaled loss that nothing unscaled.
    ``stale_since`` is the first step that computed with weights which autocast had cached before the last update.

    Of the gradients of a loss in float16 without a scale ``zeros`` is the fraction of 0, and ``smallest`` that of the
    two smallest numbers of float16, the median of several steps. ``sum_error`` is how far 16-bit sums over
    ``micro_batches`` are from the float32 sum, and ``sum_rounding`` how far that sum rounded once is.
    """

    experiment: ClassVar[str] = "mixed_precision"
    still: float = 0.0
    updates: int = 0
    kept_elsewhere: bool = False
    still_scaled: int = 0
    scale: float = 1.0
    stale_since: int | None = None
    zeros: float = 0.0
    rms_in_steps: float = math.inf
    micro_batches: int = 0
    sum_error: float = 0.0
    sum_rounding: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BatchDigitsFacts:
    """A tensor of a batch that the step used after a cast to ``dtype``: what was lost, in its standard deviations."""

    experiment: ClassVar[str] = "digits_of_batches"
    compared: int
    since: int = 0
    place: str = ""
    dtype: str = ""
    lost: float = 0.0
    values: int = 0
