"""What an update does to the weights and to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class UpdateFacts:
    """One replayed update.

    Attributes:
        loss, after: Of the batch before and after the update.
        optimizers: Optimizers that step.
        lr, weight_decay: By group of each update.
        decoupled: Weight decay acts on the weights, as in AdamW.
        ratio: Norm of the update over norm of the weights with a gradient.
        input_rms: Of the largest input.
    """

    experiment: ClassVar[str] = "update"
    loss: float
    after: float
    optimizers: int
    lr: tuple[float, ...]
    weight_decay: tuple[float, ...]
    decoupled: bool
    grad_norm: float
    norm_at_clip: float | None
    weight_norm: float
    ratio: float
    input_rms: float | None


@dataclass(frozen=True)
class BatchStepsFacts:
    """The losses of updates on one batch, and the first factor of the learning rate at which they fall steadily."""

    experiment: ClassVar[str] = "batch_steps"
    losses: tuple[float, ...]
    falls_at: float | None


@dataclass(frozen=True)
class AgainFacts:
    """A replay of a step beside the step, and beside a second replay.

    ``tolerance``: relative difference that a compiled model may have.
    """

    experiment: ClassVar[str] = "again"
    same_losses: bool
    tolerance: float
    same_twice: bool
    norm_then: float | None
    norm_now: float | None
    error: str | None


@dataclass(frozen=True)
class WritesFacts:
    """Steps before which the model was evaluated, ``compared`` in all.

    ``steps`` are the last 32 that began with other weights than the update before had left, but with the same
    optimizer state.
    """

    experiment: ClassVar[str] = "weights_between_steps"
    compared: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class LoadedMomentsFacts:
    """Second moments that an optimizer had before its first watched update, beside the squared gradients of it.

    ``gaps``: by tensor, the absolute log10 of the ratio of both, largest first. ``matched``: the mean of these if
    moments and gradients of tensors of equal shape are matched by size instead.
    """

    experiment: ClassVar[str] = "moments"
    kind: str
    names: tuple[str, ...]
    gaps: tuple[float, ...]
    matched: float
