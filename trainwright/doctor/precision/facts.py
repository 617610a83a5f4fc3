"""What is measured of the precision of a step and of its batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class OpFacts:
    """A torch function beside itself in float64: the relative error of its inputs, and that of its result."""

    op: str
    module: str | None
    dtype: str
    error_in: float
    error_out: float


@dataclass(frozen=True)
class HighFacts:
    """The highest value of a 16-bit result, and the highest that its dtype can represent."""

    op: str
    module: str | None
    dtype: str
    value: float
    most: float


@dataclass(frozen=True)
class Float64Facts:
    """The gradients of a step beside those in float64, from the same weights and inputs.

    ``error`` is their relative distance, ``noise`` that of gradients whose weights were moved by half of their last
    digit in ``dtype``, the coarsest that the step computes with. ``worst`` is the function that loses most, where the
    error is large. ``mode`` is eval where the step draws random numbers, which depend on the dtype.
    """

    experiment: ClassVar[str] = "in_float64"
    dtype: str
    mode: str
    loss: float
    loss_in_float64: float
    error: float
    noise: float
    worst: OpFacts | None
    high: HighFacts | None


@dataclass(frozen=True)
class Narrowed:
    """A tensor of a batch that was used after a cast to ``dtype`` and back: what it lost, in its standard deviations.

    ``place`` says where the step uses it: model or loss.
    """

    place: str
    dtype: str
    lost: float
    values: int


@dataclass(frozen=True)
class BatchesFacts:
    """Batches of which tensors were found again in what the step used, and those that had lost digits."""

    experiment: ClassVar[str] = "digits_of_batches"
    compared: int
    since: int
    narrowed: tuple[Narrowed, ...]


@dataclass(frozen=True)
class LostFractions:
    """Floats that were cast to ``dtype``, whole numbers, and back, and not used otherwise: what was lost, at the most,
    in their standard deviations. ``module`` is the innermost; None is the loss.
    """

    op: str
    dtype: str
    module: str | None
    lost: float
    line: str | None = None


@dataclass(frozen=True)
class CastsFacts:
    """Of one forward pass and its loss."""

    experiment: ClassVar[str] = "casts"
    lost: tuple[LostFractions, ...]
