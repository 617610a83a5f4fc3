"""Measurements of steps with values that are not finite."""

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
    """The first operation that made a step non-finite, or that read a non-finite value.

    Attributes:
        kind: "op", or the value that was non-finite before: input, target, weight, buffer, gradient, constant, state.
        what: The mechanism (see ``replay/mechanism.py``).
        name: Name of the non-finite value; None for an operation.
        reached: The part of the step that the values reached: loss, gradient, weight, buffer or end.
        op: The function that the user called.
        kernel: The ATen operation.
        phase: forward, backward or update.
        module: Path of the module.
        source: Line in the user's source.
        dtype: Data type of the operation.
        inputs: Ranges of its inputs.
        output: Range of its output.
        hidden_by: The function that discarded the values in the forward pass.
        micro_batch: Number of the micro-batch.
        eps: ``eps`` of the optimizer, for an operation of the update.
        rows: Samples of the micro-batch that each make the step non-finite alone; None if not measured.
        ids: Their ids, if known.
        empty: The single value that fills an input of exactly these samples.
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
    """The replay of a step that was not finite.

    Attributes:
        micro_batches: Number of micro-batches.
        losses: Losses without the loss scale.
        gradients: Names of the parameters whose gradient is not finite.
        finite_without_scale: Only the loss scale makes the step overflow.
        first: The first operation with a non-finite result.
        fp32_finite: The full step is finite in float32.
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
    """An argument of a model with non-finite values, and the ids of the samples that contain them."""

    dtype: str
    nan: int
    inf: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SeenNonfinite:
    """Observations of a live step that was not finite.

    Attributes:
        bad: The step itself was not finite. False if only running statistics are not.
        inputs: Arguments of the models with non-finite values.
        gradients: Names of parameters whose gradient was not finite, before clipping.
        num_gradients: Number of such parameters.
        num_after_clip: Number of such parameters after clipping; None without a clip.
        dtype: Data type of the gradients.
        poisoned: Modules whose running statistics are not finite.
    """

    experiment: ClassVar[str] = "nonfinite"
    bad: bool = False
    inputs: tuple[BadInput, ...] = ()
    gradients: tuple[str, ...] = ()
    num_gradients: int = 0
    num_after_clip: int | None = None
    dtype: str | None = None
    poisoned: tuple[str, ...] = ()
