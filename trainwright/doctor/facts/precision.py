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
    """The 16-bit dtype in a forward pass and its loss; ``loss_ops`` are the functions after the models that take it."""

    experiment: ClassVar[str] = "formats"
    dtype: str = ""
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
    rounds at random. ``stale_since`` is the first step that computed with weights which autocast had cached before the
    last update.

    Of the gradients of a loss in float16 without a scale ``zeros`` is the fraction of 0, and ``rms_in_steps`` the root
    mean square in steps of 6e-8, the median of several steps. ``sum_error`` is how far 16-bit sums over
    ``micro_batches`` are from the float32 sum, and ``sum_rounding`` how far that sum rounded once is.
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
