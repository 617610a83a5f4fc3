"""What is measured of steps that are not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class ValueRange:
    """The finite values of a tensor, and how many are not finite or 0."""

    dtype: str
    shape: tuple[int, ...]
    min: float
    max: float
    nan: int
    inf: int
    zeros: int


@dataclass(frozen=True, kw_only=True)
class FirstNonfinite:
    """The first operation that made a step non-finite, or read what was non-finite already.

    ``kind``: "op", or what was non-finite before: input, target, weight, buffer, gradient, constant, state; ``name`` is
    its name then. ``what`` is the mechanism, as of ``replay.mechanism``. ``op`` is the function that the user called,
    ``kernel`` the ATen operation. ``reached``: loss, gradient, weight, buffer or end. ``rows`` are the samples of the
    micro-batch that each make the step non-finite alone, ``ids`` their ids where these are known. ``empty`` is the one
    value that fills an input of exactly these samples. ``eps`` is that of the optimizer.
    """

    kind: str
    what: str
    name: str | None
    reached: str | None
    op: str
    kernel: str
    phase: str
    module: str | None
    source: str | None
    dtype: str
    inputs: tuple[ValueRange, ...]
    output: ValueRange
    hidden_by: str | None = None
    micro_batch: int = 0
    eps: float | None = None
    rows: tuple[int, ...] | None = None
    ids: tuple[int, ...] = ()
    empty: float | None = None


@dataclass(frozen=True, kw_only=True)
class TraceFacts:
    """The replay of a step that was not finite. ``losses`` are those without the loss scale.

    ``finite_without_scale``: only the scale of a gradient scaler makes it overflow. ``gradients`` are the names of
    those that are not finite. ``fp32_finite``: the whole step is finite in float32.
    """

    experiment: ClassVar[str] = "trace"
    micro_batches: int
    losses: tuple[float, ...] = ()
    gradients: tuple[str, ...] = ()
    finite_without_scale: bool = False
    first: FirstNonfinite | None = None
    fp32_finite: bool = False


@dataclass(frozen=True, kw_only=True)
class BadInput:
    """An argument of a model with values that are not finite, and the samples that have them."""

    dtype: str
    nan: int
    inf: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SeenNonfinite:
    """What was seen live of a step that was not finite.

    ``gradients`` are the names of the parameters whose gradient was not finite, before a clip where there was one;
    ``num_after_clip`` counts them after it. ``poisoned`` are modules whose running statistics are not finite. ``bad``:
    the step itself was not finite, and not only such statistics.
    """

    experiment: ClassVar[str] = "nonfinite"
    bad: bool = False
    inputs: tuple[BadInput, ...] = ()
    gradients: tuple[str, ...] = ()
    num_gradients: int = 0
    num_after_clip: int | None = None
    dtype: str | None = None
    poisoned: tuple[str, ...] = ()
